"""What runs inside containers. Mounted read-only at /kit/inside, never baked into an image.

Imports only the standard library, httpx, httptools, uvloop and nvidia-ml-py, which every image
lock is checked to carry; and itself by relative imports, so that it is `inside` in a container
and `kit.inside` in a test.
"""
