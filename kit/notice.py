"""Warnings: a closed set. Each has a code, a sentence and an advice, in both languages."""

from __future__ import annotations

from kit.experiment import Text
from kit.value import Value


class Notice(Value):
    """One warning of a run: its code and its sentence with what was seen and what to do."""

    code: str
    text: Text


_SET: dict[str, tuple[str, str]] = {
    "shared_cores": (
        "Server and client share the machine's {seen} cores; use 3 or more to keep them apart.",
        "服务端与客户端共用 {seen} 个核心；3 个以上核心才能隔离。",
    ),
    "busy_machine": (
        "Other programs used up to {seen} of the server's CPUs; run on a quieter machine.",
        "其他程序占用了服务端 CPU 的 {seen}；请在更空闲的机器上运行。",
    ),
    "power_limited": (
        "A device met its own power limit in up to {seen} of a window's samples and lowered its "
        "clocks: lock them for both arms to tell a format from a cooler chip.",
        "设备在某个窗口中至多 {seen} 的样本达到自身功率上限并降频："
        "两臂锁定同一时钟，才能排除芯片功耗差异。",
    ),
    "user_stamps": (
        "Receive times were not all stamped by the kernel, so a late client may show in them.",
        "接收时间并非全部由内核打戳，客户端延迟可能混入其中。",
    ),
    "null_measures": (
        "No value could be given for {seen}; the table says why.",
        "{seen} 没有数值；原因见表。",
    ),
    "pair_incomplete": (
        "A pair does not count: {seen}.",
        "有一对重复无效：{seen}。",
    ),
    "pairs_set_aside": (
        "Other load of the machine spoiled {seen} pair(s); spare pairs, registered in the plan, "
        "stand in for them.",
        "有 {seen} 对重复受本机其他负载干扰；由计划中登记的备用配对替代。",
    ),
    "against_itself": (
        "Both arms are the baseline (A/A): any difference is this machine's noise.",
        "两臂均为基线（A/A）：任何差异都是本机噪声。",
    ),
    "answers_not_judged": (
        "The weights of {seen} are random: speed is judged, accuracy is not.",
        "{seen} 的权重是随机的：只判定速度，不判定精度。",
    ),
    "stub_engine": (
        "The kit's own stub stood in for vLLM: this says nothing about vLLM.",
        "本次由 kit 自带的桩代替 vLLM：结果不说明 vLLM 的任何性质。",
    ),
    "shared_device": (
        "All engines ran on one device: a shared device, not a performance result.",
        "所有引擎共用一个设备：仅验证功能，不是性能结果。",
    ),
    "load_tool": (
        "{seen} sent the measured load in the kit's place: times are its own, its late sends "
        "cannot be seen, and opening a connection counts in the TTFT.",
        "被测负载由 {seen} 代替 kit 发送：时间均为其自身读数，无法看出发送延迟，"
        "TTFT 含建立连接的时间。",
    ),
    "few_pairs": (
        "Only {seen} pairs: six are the least that can decide; leave out --quick or raise "
        "--replicates.",
        "只有 {seen} 对重复：至少六对才能下结论；去掉 --quick 或增大 --replicates。",
    ),
    "stopped_early": (
        "The run ended after {seen} pairs by the rule in its plan: the verdict allows for the "
        "looks, the interval does not.",
        "按计划中登记的规则，在 {seen} 对后停止：判定已计入多次查看，区间未计入。",
    ),
    "image_declared": (
        "Image {seen} was not built from a lock here: its identity is declared, not verified.",
        "镜像 {seen} 不是由锁文件构建：其身份仅为声明，未经验证。",
    ),
    "commit_declared": (
        "Image {seen} carries no vLLM commit: its version is declared by the release.",
        "镜像 {seen} 不含 vLLM 提交号：版本以发布声明为准。",
    ),
    "resumed": (
        "The run was interrupted and went on later on the same machine, after {seen} replicates.",
        "本次运行曾中断，之后在同一台机器上从第 {seen} 个重复之后继续。",
    ),
    "dirty_kit": (
        "The kit's checkout had uncommitted changes; their hash is in the manifest.",
        "kit 的检出含未提交改动；其哈希已写入清单。",
    ),
    "concluded_again": (
        "Measures and verdict were computed again from the raw files, by the rules of kit {seen}.",
        "各项度量与判定依据原始文件重新计算，采用 kit {seen}。",
    ),
    "nothing_sampled": (
        "No stack of the engine could be sampled: {seen}.",
        "未能采样到引擎的任何调用栈：{seen}。",
    ),
    "sampler_behind": (
        "The stack sampler was up to {seen} behind: times from samples are rough.",
        "调用栈采样最多落后 {seen}：由采样得到的时间仅为粗略值。",
    ),
    "kit_cost": (
        "The kit itself took {seen} of the time accounted for, more than 1.10.",
        "kit 自身耗时为应计时间的 {seen}，超过 1.10。",
    ),
}


def notice(code: str, seen: str) -> Notice:
    """Return the warning of that code with what was seen filled in."""
    en, zh = _SET[code]
    return Notice(code=code, text=Text(en=en.format(seen=seen), zh=zh.format(seen=seen)))


def codes() -> list[str]:
    """Return the codes of all warnings there are."""
    return sorted(_SET)
