"""Make a model folder that vLLM can serve, the same bytes on every machine.

Runs inside a container of a locked image, without network, as an ordinary user:
`convert_model.py wheel SOURCE.gguf OUT` or `convert_model.py shape VOCABULARY CONFIG.json OUT`.
"""

import json
import sys
from pathlib import Path

# The library's version says nothing about the model, but readers take its absence for a sign of
# an old, wrongly split tokenizer: one fixed value that marks the format.
FORMAT_VERSION = "5.0.0"
VOLATILE_KEYS = ("_name_or_path", "_model_name_or_path")
NO_LIMIT = int(1e30)  # transformers' own word for a tokenizer without a length limit
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END_OF_TEXT = "<|endoftext|>"
QWEN_SPECIAL = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def convert_gguf(source: Path, out: Path) -> None:
    """Dequantise a GGUF file to bfloat16 safetensors with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(out)
    write_gguf_tokenizer(source, out)


def render_bpe(tokens: list, special: list, merges: list) -> dict:
    """Return a byte-level BPE tokenizer in the format of tokenizer.json."""
    whole = {"add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": tokens[i], **flags, "special": True} for i in special
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **whole, "add_prefix_space": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first],
            "pair": [first, second],
            "special_tokens": {},
        },
        "decoder": {"type": "ByteLevel", **whole},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def write_gguf_tokenizer(source: Path, out: Path) -> None:
    """Write the byte-level BPE tokenizer that a GGUF file carries.

    Not left to transformers: 5.17 and 5.19 turn the same file into different tokenizers.
    """
    from gguf import GGUFReader, TokenType

    fields = GGUFReader(str(source)).fields

    def read(name: str):  # type: ignore[no-untyped-def]
        return fields[f"tokenizer.{name}"].contents()

    tokens, types = read("ggml.tokens"), read("ggml.token_type")
    if read("ggml.model") != "gpt2":
        raise SystemExit("only byte-level BPE tokenizers of GGUF files are converted")
    special = [i for i, kind in enumerate(types) if kind == TokenType.CONTROL]
    tokenizer = render_bpe(tokens, special, read("ggml.merges"))
    text = json.dumps(tokenizer, indent=2, ensure_ascii=False)
    (out / "tokenizer.json").write_text(text, encoding="utf-8")
    settings = {
        "backend": "tokenizers",
        "is_local": True,
        "local_files_only": True,
        "model_max_length": NO_LIMIT,
        "tokenizer_class": "TokenizersBackend",
        "bos_token": tokens[read("ggml.bos_token_id")],
        "eos_token": tokens[read("ggml.eos_token_id")],
        "pad_token": tokens[read("ggml.padding_token_id")],
        "unk_token": tokens[read("ggml.unknown_token_id")],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (out / "chat_template.jinja").write_text(read("chat_template"), encoding="utf-8")


def write_shape(vocabulary: Path, config: Path, out: Path) -> None:
    """Write a configuration and Qwen's tokenizer; the server makes the weights."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter(
        vocab_file=str(vocabulary),
        pattern=QWEN_PATTERN,
        extra_special_tokens=list(QWEN_SPECIAL),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(),
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(out)
    (out / "config.json").write_text(config.read_text(encoding="utf-8"), encoding="utf-8")


def settle(out: Path) -> None:
    """Write every JSON file of settings with sorted keys and without what changes by itself."""
    for path in sorted(out.glob("*.json")):
        if path.name == "tokenizer.json":
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            for key in VOLATILE_KEYS:
                found.pop(key, None)
            if path.name == "config.json" or "transformers_version" in found:
                found["transformers_version"] = FORMAT_VERSION
        text = json.dumps(found, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    KIND, OUT = sys.argv[1], Path(sys.argv[-1])
    OUT.mkdir(parents=True)
    if KIND == "wheel":
        convert_gguf(Path(sys.argv[2]), OUT)
    else:
        write_shape(Path(sys.argv[2]), Path(sys.argv[3]), OUT)
    settle(OUT)
