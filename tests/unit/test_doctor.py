"""doctor: what planted machines can run, why not, and the exit code that a run would have."""

from typing import Any

import pytest

from kit import doctor, run
from kit.doctor import (
    Form,
    Line,
    can_run,
    check_experiments,
    check_machine,
)
from kit.errors import (
    DeviceMissing,
    DiskFull,
    DriverTooOld,
    EngineMissing,
    IndexUnreachable,
    NotLocked,
    ToolMissing,
)
from kit.experiment import experiment_names, find_experiment
from kit.model import find_model
from kit.seen import Looked, Problem, SeenDevice, SeenImage, SeenModel

GIB = 2**30
EXPERIMENTS = {name: find_experiment(name) for name in experiment_names()}
NO_ENGINE = Problem(
    message="no Docker Engine answers on this machine",
    hint="run `nox -s engine`",
    exit_code=EngineMissing.exit_code,
)
H200 = SeenDevice(name="NVIDIA H200", memory_bytes=140 * GIB)


def image(name: str, cuda: str, **changes: Any) -> SeenImage:
    values = {"id": name, "cuda": cuda, "lock": "locked", "built": True, "inputs_here": True}
    return SeenImage.model_validate({**values, **changes})


def model(name: str, **changes: Any) -> SeenModel:
    record = find_model(name)
    values: dict[str, Any] = {
        "id": name,
        "weights": record.weights,
        "present": True,
        "source_here": True,
        "files": ("config.json",),
        "config": record.config,
    }
    return SeenModel.model_validate({**values, **changes})


DEFAULT_MODEL = "smollm2-135m-instruct"
MODELS = (model(DEFAULT_MODEL), model("qwen2.5-0.5b"), model("qwen2.5-7b"))


def machine(**changes: Any) -> Looked:
    """Return a small CPU machine on which everything is there, with these changes."""
    values: dict[str, Any] = {
        "platform": "cpu",
        "default_image": "c",
        "default_model": DEFAULT_MODEL,
        "engine": "26.1.5",
        "plugins": {"compose": "2.26.1", "buildx": "0.13.1"},
        "free_bytes": {"runs": 100 * GIB, "cache": 100 * GIB},
        "store_free_bytes": 100 * GIB,
        "memory_available_bytes": 32 * GIB,
        "server_cpus": 2,
        "cpu_flags": ("avx2",),
        "devices": (),
        "gpu_refusal": "no NVIDIA device answers",
        "driver": None,
        "driver_cuda": None,
        "images": (image("c", "cpu"),),
        "models": MODELS,
        "network": True,
        "base_lacks": (),
    }
    return Looked.model_validate({**values, **changes})


def gpus(count: int, **changes: Any) -> Looked:
    return machine(
        **{
            "platform": "cuda",
            "default_image": "g",
            "images": (image("g", "cu130"),),
            "devices": (H200,) * count,
            "gpu_refusal": "",
            "driver": "580.1",
            "driver_cuda": "13.0",
            **changes,
        }
    )


def judged(seen: Looked) -> tuple[dict[str, Line], list[Form]]:
    lines = check_machine(seen)
    return {line.what: line for line in lines}, check_experiments(seen, lines, EXPERIMENTS)


def row(forms: list[Form], experiment: str, variant: str = "default") -> Form:
    return next(f for f in forms if f.experiment == experiment and variant in f.variants)


def test_a_machine_with_everything_can_run() -> None:
    lines, forms = judged(machine())
    assert {line.state for line in lines.values()} <= {"ok", "not needed"}
    assert (can_run(forms).state, can_run(forms).exit_code) == ("ok", 0)
    assert lines["GPUs"].state == lines["container registry"].state == "not needed"


def test_every_variant_of_every_experiment_is_in_one_row() -> None:
    _, forms = judged(machine())
    told = [(f.experiment, v) for f in forms for v in f.variants]
    wanted = [(n, v) for n, e in EXPERIMENTS.items() for v in ("default", *e.variants)]
    assert sorted(told) == sorted(wanted)


def test_without_an_engine_it_is_the_first_thing_said_and_the_exit_code() -> None:
    seen = machine(
        engine=NO_ENGINE,
        plugins=NO_ENGINE,
        store_free_bytes=None,
        images=(image("c", "cpu", built=None),),
    )
    lines, forms = judged(seen)
    assert lines["engine"].state == "missing"
    assert lines["engine"].next == "run `nox -s engine`"
    assert {f.state for f in forms} == {"missing"}
    assert can_run(forms).exit_code == EngineMissing.exit_code
    assert can_run(forms).why == "engine: no Docker Engine answers on this machine"
    assert "no engine says whether it is built" in lines["image c"].found


NOTHING_BUILT = (image("c", "cpu", built=False, inputs_here=False),)


@pytest.mark.parametrize(
    ("changes", "what", "code"),
    [
        ({"free_bytes": {"runs": GIB}}, "disk, runs", DiskFull.exit_code),
        ({"memory_available_bytes": GIB}, "memory", DiskFull.exit_code),
        (
            {"store_free_bytes": 5 * GIB, "images": NOTHING_BUILT},
            "disk, images",
            DiskFull.exit_code,
        ),
        (
            {"images": (image("c", "cpu", built=False, lock="not locked"),)},
            "image c",
            NotLocked.exit_code,
        ),
        ({"images": NOTHING_BUILT, "network": False}, "image c", IndexUnreachable.exit_code),
        (
            {"images": NOTHING_BUILT, "base_lacks": ("newuidmap",)},
            "base's programs",
            ToolMissing.exit_code,
        ),
        (
            {
                "models": (model(DEFAULT_MODEL, present=False, source_here=False), *MODELS[1:]),
                "network": False,
            },
            f"model {DEFAULT_MODEL}",
            IndexUnreachable.exit_code,
        ),
        ({"platform": "cuda"}, "GPUs", DeviceMissing.exit_code),
    ],
)
def test_what_is_missing_has_a_next_step_and_the_code_of_its_error(
    changes: dict[str, Any], what: str, code: int
) -> None:
    lines, forms = judged(machine(**changes))
    assert (lines[what].state, lines[what].exit_code) == ("missing", code)
    assert lines[what].next
    assert can_run(forms).exit_code == code
    assert can_run(forms).next == lines[what].next


def test_a_run_refuses_below_the_room_that_is_asked_for_here() -> None:
    assert doctor.RUN_BYTES == run.FREE_BYTES


def test_a_first_build_needs_more_room_than_a_run() -> None:
    roomy = {"store_free_bytes": 5 * GIB}
    assert judged(machine(**roomy))[0]["disk, images"].state == "ok"
    assert judged(machine(**roomy, images=NOTHING_BUILT))[0]["disk, images"].state == "missing"


def test_offline_is_fine_where_everything_is_there() -> None:
    lines, forms = judged(machine(network=False, images=(image("c", "cpu", built=False),)))
    assert lines["network"].state == "not needed"
    assert lines["image c"].state == "ok"
    assert "the first run builds it" in lines["image c"].next
    assert can_run(forms).state == "ok"


def test_an_adopted_image_of_the_same_kind_is_offered() -> None:
    own = image("own", "cpu", lock="adopted")
    missing = image("c", "cpu", built=False, inputs_here=False)
    told = judged(machine(network=False, images=(missing, own)))[0]
    assert told["image c"].next.endswith("; or run with `--image own`, adopted here")
    assert told["image own"].state == "ok"
    other = own.model_copy(update={"cuda": "cu130"})
    assert (
        "--image" not in judged(machine(network=False, images=(missing, other)))[0]["image c"].next
    )


def test_too_few_devices_end_unsupported_and_enough_do_not() -> None:
    _, forms = judged(gpus(2))
    assert row(forms, "adv2_tp_scaling").state == "ok"
    four = row(forms, "adv2_tp_scaling", "tp-4")
    assert (four.state, four.why) == ("unsupported", "needs 4 devices, this machine has 2")
    pair = row(judged(gpus(1))[1], "adv4_pd_disagg")
    assert (pair.state, pair.topology) == ("unsupported", "replicas / pd")
    assert pair.why == "needs 2 devices, this machine has 1"


def test_heads_that_do_not_divide_are_told() -> None:
    eight = row(judged(gpus(8))[1], "adv2_tp_scaling", "tp-8")
    assert (eight.state, eight.why) == ("unsupported", "14 attention heads do not divide by 8")


def test_what_the_platform_or_processor_does_not_offer_is_unsupported_on_cpu_alone() -> None:
    _, forms = judged(machine())
    assert row(forms, "adv3_async_scheduling").why == "the platform cpu does not offer it"
    fp8 = row(forms, "exp3_fp8_kv")
    assert fp8.why == "the processor has none of avx512f, amx_bf16"
    assert row(forms, "exp3_fp8_kv", "bf16-kv").state == "ok"
    assert row(judged(machine(cpu_flags=("avx512f",)))[1], "exp3_fp8_kv").state == "ok"
    for name in ("adv3_async_scheduling", "exp3_fp8_kv"):
        assert row(judged(gpus(1))[1], name).state == "ok"


def test_a_model_that_does_not_fit_is_told_before_it_is_loaded() -> None:
    small = SeenDevice(name="small", memory_bytes=12 * GIB)
    seven = row(judged(gpus(1, devices=(small,)))[1], "adv1_quantization", "awq")
    assert (seven.state, seven.next) == ("missing", "give a smaller --model")
    assert seven.why == "qwen2.5-7b has 14.2 GiB of weights, 10.8 are there"
    assert row(judged(gpus(1))[1], "adv1_quantization", "awq").state == "ok"


def test_a_model_without_the_file_that_a_variant_needs_is_told() -> None:
    eagle = row(judged(machine())[1], "exp5_ngram_spec", "eagle")
    assert (eagle.state, eagle.why) == (
        "missing",
        "smollm2-135m-instruct has no draft/config.json",
    )


def test_a_driver_that_is_too_old_is_told_with_both_versions() -> None:
    lines, forms = judged(gpus(1, driver="570.1", driver_cuda="12.8"))
    assert lines["driver"].found == "driver 570.1 for CUDA 12.8, g needs 13.0"
    assert can_run(forms).exit_code == DriverTooOld.exit_code
