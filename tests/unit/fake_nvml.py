"""A stand-in for `pynvml` with two devices, in which single things can be broken."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

UUIDS = (
    "GPU-11111111-aaaa-bbbb-cccc-000000000001",
    "GPU-22222222-aaaa-bbbb-cccc-000000000002",
)
_PLAIN: dict[str, Any] = {
    "nvmlSystemGetDriverVersion": "580.159.04",
    "nvmlSystemGetNVMLVersion": "13.580.159.04",
    "nvmlSystemGetCudaDriverVersion": 13000,
    "nvmlDeviceGetCount": 2,
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150_754_820_096, used=1_000_000, free=0),
    "nvmlDeviceGetVbiosVersion": "96.00.BC.00.01",
    "nvmlDeviceGetGspFirmwareVersion": "580.159.04",
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:FF:1F.0"),
    "nvmlDeviceGetPowerUsage": 76_543,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetTemperature": 31,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=7, memory=1),
    "nvmlDeviceGetPerformanceState": 0,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x80,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40,
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetEccMode": [1, 0],
    "nvmlDeviceGetMigMode": [0, 0],
    "nvmlDeviceGetMaxMigDeviceCount": 0,
    "nvmlDeviceGetComputeMode": 0,
    "nvmlDeviceGetComputeRunningProcesses": [],
    "nvmlDeviceGetCpuAffinity": [0b1111],
    "nvmlDeviceGetClockInfo": 345,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetApplicationsClock": 1980,
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetTopologyCommonAncestor": 40,
    "nvmlDeviceGetP2PStatus": 0,
}


class FakeNvml:
    """Offers the functions that the probe calls; `broken` overrides them by name.

    A broken entry is an exception to raise, a value to return, or a function of the
    arguments; `None` removes the function, as an older binding would.
    """

    NVMLError = pynvml.NVMLError
    NVMLError_NotFound = pynvml.NVMLError_NotFound
    NVMLError_InvalidArgument = pynvml.NVMLError_InvalidArgument

    def __init__(self, **broken: Any) -> None:
        self.broken = broken
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml") or (name in self.broken and self.broken[name] is None):
            raise AttributeError(f"module 'pynvml' has no attribute '{name}'")

        def call(*args: Any) -> Any:
            self.calls.append(name)
            return self._answer(name, args)

        return call

    def _answer(self, name: str, args: tuple[Any, ...]) -> Any:
        if name in self.broken:
            answer = self.broken[name]
            if isinstance(answer, Exception):
                raise answer
            return answer(*args) if callable(answer) else answer
        if name == "nvmlDeviceGetHandleByIndex":
            return args[0]
        if name == "nvmlDeviceGetUUID":
            return UUIDS[args[0]] if isinstance(args[0], int) else str(args[0])
        if name == "nvmlDeviceGetNvLinkState":
            if args[1] >= 4:
                raise pynvml.NVMLError_InvalidArgument()
            return 1
        if name in ("nvmlInit", "nvmlShutdown"):
            return None
        return _PLAIN[name]
