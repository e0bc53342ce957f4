"""Probes of every rule of the silicon that documents leave open: the question, the architectures, and the consequence.

A probe launches a tiny kernel of ``kernels.probes`` and judges its output. It runs in a separate process.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nvfp4_cute import env
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.formats.codecs import encode_e4m3
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.gpus import targets
from nvfp4_cute.operands import tensor_map_fault
from nvfp4_cute.operands.draws import Dice
from nvfp4_cute.ops.parts import Parts, grouped_gemm
from nvfp4_cute.planning.arch import ARCHS
from nvfp4_cute.prove.exact import difference
from nvfp4_cute.prove.outcome import FAULT, NOT_HERE, PASSED, WRONG, Job, Outcome
from nvfp4_cute.prove.probe_keys import ProbeTask

TENSOR_MEMORY = ("sm_100a", "sm_103a", "sm_110a")
HOPPER = ("sm_90a",)
Finding = tuple[str, str, dict[str, float]]
"""Verdict, observation, figures."""


@dataclass(frozen=True)
class Machine:
    """The machine that a probe runs on.

    Attributes:
        backend: backend argument of operations.
        device: device of tensors.
        arch: architecture of the GPU, emulated or not.
        num_sms: its SMs.
    """

    backend: str
    device: str
    arch: str
    num_sms: int

    @property
    def is_gpu(self) -> bool:
        """Whether it is a real GPU, not the emulator."""
        return self.backend == "cuda"

    @classmethod
    def of(cls, backend: str) -> "Machine":
        """Returns the GPU of this machine, or the one that the backend's name states."""
        if backend == "cuda":
            gpu = targets.gpu_of(torch.device("cuda"))
            return cls(backend, "cuda", gpu.arch, gpu.num_sms)
        target = targets.lookup(backend.partition(":")[2])
        return cls(backend, "cpu", target.arch, target.num_sms)


@dataclass(frozen=True)
class Probe:
    """One question.

    Attributes:
        rule: number of its subject in the project's list of silicon rules.
        question: the question that "passed" answers with yes.
        decides: consequence of the answer.
        archs: architectures that can run it.
        expected: unsurprising verdicts on a GPU; several if the answer is open.
        ask: function that runs it.
    """

    rule: str
    question: str
    decides: str
    archs: tuple[str, ...]
    expected: tuple[str, ...]
    ask: Callable[[Machine], Finding]


def run(job: Job) -> Outcome:
    """Runs the probe of a job. Raises KeyError for one that is not in the table."""
    name = job.arguments["probe"]
    machine = Machine.of(job.backend)
    if machine.arch not in PROBES[name].archs:
        return Outcome(job.kind, job.name, NOT_HERE, f"asked of {', '.join(PROBES[name].archs)}")
    verdict, detail, numbers = PROBES[name].ask(machine)
    return Outcome(job.kind, job.name, verdict, detail, numbers=numbers)


def _words(machine: Machine, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=machine.device)


def _synchronize(machine: Machine) -> None:
    if machine.is_gpu:
        torch.cuda.synchronize()


def _counted(wrong: int, total: int, what: str) -> Finding:
    verdict = WRONG if wrong else PASSED
    return verdict, f"{wrong} of {total} {what} wrong", {"wrong": float(wrong), "tried": float(total)}


# ---- clusters --------------------------------------------------------------------------------------------------
def _repeated(name: str, words: int) -> Callable[[Machine], Finding]:
    """Returns a probe in which pairs of CTAs repeat an exchange of `words` words; the kernel counts the errors."""

    def ask(machine: Machine) -> Finding:
        rounds, pairs = (20000, machine.num_sms // 2) if machine.is_gpu else (3, 1)
        out = _words(machine, 1)
        ProbeTask(name, out, _words(machine, 1), 2 * pairs, rounds).run(machine.backend)
        _synchronize(machine)
        return _counted(int(out.cpu()[0]), rounds * pairs * words, "words")

    return ask


def _exits(machine: Machine) -> Finding:
    launches, pairs = (200, machine.num_sms // 2) if machine.is_gpu else (1, 1)
    out = _words(machine, 1)
    for _ in range(launches):
        ProbeTask("cluster_exit", out, _words(machine, 1), 2 * pairs).run(machine.backend)
    _synchronize(machine)
    return _counted(int(out.cpu()[0]), launches * 2 * pairs * 64, "words")


CHAIN = 64


def _chain(name: str, ctas: int, machine: Machine, out: torch.Tensor, data: torch.Tensor) -> None:
    """Enqueues launches that each check the output of the previous one."""
    data.zero_()
    for number in range(CHAIN if machine.is_gpu else 2):
        ProbeTask(name, out, data, ctas, number).run(machine.backend)


def _dependent(name: str) -> Callable[[Machine], Finding]:
    def ask(machine: Machine) -> Finding:
        ctas = machine.num_sms // 2 * 2 if machine.is_gpu else 2
        out, data = _words(machine, 1), _words(machine, 2 * ctas)
        repeats = 20 if machine.is_gpu else 1
        for _ in range(repeats):
            _chain(name, ctas, machine, out, data)
        _synchronize(machine)
        return _counted(int(out.cpu()[0]), repeats * CHAIN * ctas, "words of the launch before")

    return ask


def _captured(machine: Machine) -> Finding:
    """Runs the chain as a CUDA graph, with and without clusters."""
    if not machine.is_gpu:
        return NOT_HERE, "the emulator captures no graphs", {}
    ctas, wrong = machine.num_sms // 2 * 2, 0
    for name in ("pdl", "pdl_cluster"):
        out, data = _words(machine, 1), _words(machine, 2 * ctas)
        _chain(name, ctas, machine, out, data)
        _synchronize(machine)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _chain(name, ctas, machine, out, data)
        for _ in range(20):
            graph.replay()
        _synchronize(machine)
        wrong += int(out.cpu()[0])
    return _counted(wrong, 2 * 21 * CHAIN * ctas, "words of the launch before")


# ---- residency -------------------------------------------------------------------------------------------------
LOOKS = 200_000
"""Number of times a CTA checks whether the others have arrived, at least half a microsecond each."""
PORTABLE = 8
"""CTAs per cluster that every GPU accepts."""
UNLIMITED = "an emulator has no SMs that are taken"


def resident_clusters(arch: str, size: int) -> int:
    """Returns the number of resident clusters, with one CTA per SM, that the driver states."""
    import cuda.bindings.driver as cuda

    from nvfp4_cute.compile.cache import get_kernel
    from nvfp4_cute.kernels.probes.table import body_of
    from nvfp4_cute.prove.probe_keys import ProbeKey

    def checked(result: tuple) -> object:
        if result[0] != cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"CUDA error: {result[0].name}")
        return result[1] if len(result) > 1 else None

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    key = ProbeKey(arch, f"meet_{size if size <= PORTABLE else 1}")
    kernel, smem = get_kernel(key), body_of(key.name, arch).smem_bytes + 1024
    name = next(line for line in kernel.ptx.splitlines() if ".entry" in line).split(".entry")[1].strip(" (")
    module = checked(cuda.cuModuleLoadData(kernel.cubin))
    function = checked(cuda.cuModuleGetFunction(module, name.encode()))
    limits = cuda.CUfunction_attribute
    checked(cuda.cuFuncSetAttribute(function, limits.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem))
    if size > PORTABLE:
        checked(
            cuda.cuFuncSetAttribute(function, limits.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        )
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = size, 1, 1
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = size, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    config.sharedMemBytes, config.attrs, config.numAttrs = smem, [attribute], 1
    return int(checked(cuda.cuOccupancyMaxActiveClusters(function, config)))  # type: ignore[call-overload]


def _gave_up(machine: Machine, name: str, ctas: int) -> int:
    """Returns the number of CTAs of a launch that did not see all others."""
    out = _words(machine, 1)
    ProbeTask(name, out, _words(machine, 1), ctas, ctas, LOOKS).run(machine.backend)
    _synchronize(machine)
    return int(out.cpu()[0])


def _resident(size: int) -> Callable[[Machine], Finding]:
    def ask(machine: Machine) -> Finding:
        if not machine.is_gpu:
            return NOT_HERE, UNLIMITED, {}
        count = resident_clusters(machine.arch, size)
        alone = _gave_up(machine, f"meet_{size}", count * size)
        more = _gave_up(machine, f"meet_{size}", (count + 1) * size)
        detail = (
            f"the driver says {count}: {'all met' if not alone else f'{alone} CTAs gave up'}; with one more "
        )
        detail += "all met, too" if more == 0 else f"{more} gave up"
        return (
            (WRONG if alone else PASSED),
            detail,
            {"clusters": float(count), "one_more_met": float(more == 0)},
        )

    return ask


def _beyond_portable(machine: Machine) -> Finding:
    """Only queries the driver, because kernels here have clusters of at most eight."""
    if not machine.is_gpu:
        return NOT_HERE, UNLIMITED, {}
    count = resident_clusters(machine.arch, 16)
    return (PASSED if count else WRONG), f"the driver says {count}", {"clusters": float(count)}


def _cooperative(machine: Machine) -> Finding:
    if not machine.is_gpu:
        return NOT_HERE, UNLIMITED, {}
    ctas = machine.num_sms
    plain, cooperative = (_gave_up(machine, name, ctas) for name in ("meet_1", "meet_cooperative"))
    detail = f"a CTA an SM: {plain} gave up in a plain launch, {cooperative} in a cooperative one"
    return (
        (WRONG if cooperative else PASSED),
        detail,
        {"plain": float(plain), "cooperative": float(cooperative)},
    )


HOG_LOOKS = 5000
"""Milliseconds for which a launch holds half of the SMs."""


def _two_streams(machine: Machine) -> Finding:
    """Starts two plain launches, each with one CTA per SM, while a third one holds half of the SMs and then releases them.

    The second launch has a higher priority, so it gets the SMs that the first one's CTAs wait for.
    """
    if not machine.is_gpu:
        return NOT_HERE, "the emulator runs one launch at a time", {}
    ctas = machine.num_sms
    _gave_up(machine, "meet_1", ctas)
    outs, counters = ([_words(machine, 1) for _ in range(3)] for _ in range(2))
    _synchronize(machine)
    launches = ((0, ctas // 2, HOG_LOOKS), (0, ctas, LOOKS), (-1, ctas, LOOKS))
    for out, counter, (priority, count, looks) in zip(outs, counters, launches, strict=True):
        with torch.cuda.stream(torch.cuda.Stream(priority=priority)):
            ProbeTask("meet_1", out, counter, count, ctas, looks).run(machine.backend)
    _synchronize(machine)
    gave_up = sum(int(out.cpu()[0]) for out in outs[1:])
    return (
        (WRONG if gave_up else PASSED),
        f"{gave_up} of {2 * ctas} CTAs gave up",
        {"gave_up": float(gave_up)},
    )


# ---- inside a CTA ----------------------------------------------------------------------------------------------
def _release(name: str) -> Callable[[Machine], Finding]:
    def ask(machine: Machine) -> Finding:
        rounds, ctas = (4000, machine.num_sms) if machine.is_gpu else (3, 1)
        data = torch.arange(1024, dtype=torch.int32) + 4096 * torch.arange(rounds, dtype=torch.int32)[:, None]
        out = _words(machine, 1)
        ProbeTask(name, out, data.to(machine.device), ctas, rounds).run(machine.backend)
        _synchronize(machine)
        return _counted(int(out.cpu()[0]), rounds * ctas * 1024, "words")

    return ask


def _registers(machine: Machine) -> Finding:
    out = _words(machine, 1)
    ctas = 4 * machine.num_sms if machine.is_gpu else 1
    ProbeTask("register_counts", out, _words(machine, 1), ctas).run(machine.backend)
    _synchronize(machine)
    return _counted(int(out.cpu()[0]), 256 * ctas, "sums")


def _warpgroup_wait(machine: Machine) -> Finding:
    late = wrong = 0
    sleeps = (0, 1000, 20_000, 100_000) if machine.is_gpu else (0,)
    for ns in sleeps:
        out = _words(machine, 2)
        ProbeTask("wgmma_wait", out, _words(machine, 1), 1, ns).run(machine.backend)
        _synchronize(machine)
        late, wrong = late + int(out.cpu()[0]), wrong + int(out.cpu()[1])
    covers = (
        "covers its warpgroup" if not late else f"does not cover its warpgroup: {late} results of a late warp"
    )
    verdict = WRONG if late or wrong else PASSED
    return verdict, f"one warp's wait {covers}; {wrong} results of its own wrong", {"late": float(late)}


def _pitched(machine: Machine) -> Finding:
    """Tests operands and outputs with gaps between their rows, each in a small allocation of its own.

    Skips the check that refuses such operands, because the question is whether it is needed.
    """
    if machine.is_gpu:
        env.disable_torch_caching()
    refuse, tensor_map_fault.check = tensor_map_fault.check, lambda *_: None
    try:
        wrong = _wrong_with_gaps(machine)
    finally:
        tensor_map_fault.check = refuse
    return (WRONG if wrong else PASSED), "; ".join(wrong) or "bit-equal", {}


def _wrong_with_gaps(machine: Machine) -> list[str]:
    """Returns the products of such operands that differ."""
    m, n, k, dice = 40, 72, 96, Dice(3)
    wrong = []
    for extra in (16, 48):
        a, b, a_scale, b_scale = dice.values(m, k), dice.values(n, k), dice.scales(m, k), dice.scales(n, k)
        row_bytes = NVFP4.row_bytes(k)
        wide = [
            torch.full((len(t), row_bytes + extra), 0x77, dtype=torch.uint8, device=machine.device)
            for t in (a, b)
        ]
        for buffer, values in zip(wide, (a, b), strict=True):
            buffer[:, :row_bytes] = values.to(machine.device)
        out = torch.full((m, n + 8), float("nan"), dtype=torch.float16, device=machine.device)
        gapped = [
            Parts([t[:, :row_bytes]], [s.to(machine.device)])
            for t, s in zip(wide, (a_scale, b_scale), strict=True)
        ]
        grouped_gemm(gapped[0], gapped[1], out=[out[:, :n]], out_dtype=torch.float16, backend=machine.backend)
        exact = Parts([a], [a_scale]), Parts([b], [b_scale])
        want = grouped_gemm(*exact, out_dtype=torch.float16, backend="reference")
        found = difference([out[:, :n].cpu()], want)
        wrong += [f"{extra} bytes between rows: {found}"] if found else []
    return wrong


# ---- tensor memory ---------------------------------------------------------------------------------------------
def _scaled(n: int, column: int) -> Callable[[Machine], Finding]:
    """Returns a probe in which every row of B has a different scale, so a result shows which scale it got."""
    name = f"mma_n{n}" + f"_column{column}" * (column > 0)

    def ask(machine: Machine) -> Finding:
        rows = torch.arange(256)
        values = 2.0 ** (rows // 32 - 2) * (1 + (rows % 8) / 8)
        scales = torch.cat([torch.ones(128), values])
        blocked = [
            to_blocked(encode_e4m3(part[:, None].expand(128, 4).contiguous())) for part in scales.split(128)
        ]
        data = torch.cat([part.view(torch.uint8).flatten() for part in blocked]).to(machine.device)
        out = torch.full((128, 256), float("nan"), dtype=torch.float32, device=machine.device)
        ProbeTask(name, out, data, 1).run(machine.backend)
        _synchronize(machine)
        got, want = out.cpu()[:, :n], 64 * values[32 * column : 32 * column + n].expand(128, n)
        wrong = int((got != want).sum())
        shift = next(
            (c for c in range(8) if torch.equal(got, 64 * values.roll(-32 * c)[:n].expand(128, n))), None
        )
        seen = (
            f"; these are the scales {shift} columns from the first one"
            if wrong and shift is not None
            else ""
        )
        verdict, detail, numbers = _counted(wrong, 128 * n, "results")
        return verdict, detail + seen, numbers

    return ask


def _pair(machine: Machine) -> Finding:
    for ns in (0, 1000, 100_000) if machine.is_gpu else (0,):
        out = _words(machine, 2)
        ProbeTask("pair_alloc", out, _words(machine, 1), 2, ns).run(machine.backend)
        _synchronize(machine)
        if not bool((out.cpu() > 0).all()):
            return WRONG, f"no columns with {ns} ns between the CTAs", {}
    return PASSED, "both CTAs got their columns, however late the other one was", {}


# ---- the table -------------------------------------------------------------------------------------------------
SPLIT_K = "whether split-K may be a default"
PROBES: dict[str, Probe] = {
    "st_async": Probe(
        "S2", "Do words sent with st.async come whole to a waiter with .acquire.cta?", SPLIT_K, ARCHS, (PASSED,),
        _repeated("st_async", 512),
    ),
    "st_async_v4": Probe(
        "S2, section 5", "Do vectors of st.async come whole to a waiter with .acquire.cta?", SPLIT_K, ARCHS, (PASSED,),
        _repeated("st_async_v4", 512),
    ),
    "arrives_in_order": Probe(
        "S3", "Are two arrivals of one thread at another CTA's barriers seen in order?",
        "whether accumulators may be handed over before tensor memory", ARCHS, (PASSED,),
        _repeated("arrives_in_order", 1),
    ),
    "cluster_exit": Probe(
        "S9, 45", "May warps arrive at the cluster barrier and end without waiting?", SPLIT_K, ARCHS, (PASSED,), _exits
    ),
    "pdl": Probe(
        "46", "Does griddepcontrol.wait show what the launch before wrote?", "whether launches overlap", ARCHS, (PASSED,),
        _dependent("pdl"),
    ),
    "pdl_cluster": Probe(
        "S5", "The same of launches of clusters?", SPLIT_K, ARCHS, (PASSED,), _dependent("pdl_cluster")
    ),
    "pdl_graph": Probe(
        "S4", "The same in a CUDA graph?", "whether graphs keep the attribute", ARCHS, (PASSED,), _captured
    ),
    **{
        f"resident_{size}": Probe(
            "V5, S6, 51", f"Are as many clusters of {size} resident as the driver says, and no more?",
            "how many clusters a persistent launch has", ARCHS, (PASSED,), _resident(size),
        )
        for size in (1, 2, 4, 8)
    },
    "resident_16": Probe(
        "S6, 51", "Is a cluster of 16 resident?", "nothing yet: kernels have 8 at most", ARCHS,
        (PASSED, WRONG, FAULT),         _beyond_portable,
    ),
    "spin_cooperative": Probe(
        "V3", "Do CTAs of a cooperative launch, one an SM, all meet?", "how a chain of layers is launched", ARCHS,
        (PASSED,), _cooperative,
    ),
    "spin_two_streams": Probe(
        "V3", "Do CTAs of two plain launches at once meet?", "whether chains may overlap", ARCHS, (PASSED, WRONG),
        _two_streams,
    ),
    "early_release": Probe(
        "40", "Does an arrival wait for reads of shared memory before it that nothing used yet?",
        "whether a stage may be released without using what was read", ARCHS, (PASSED, WRONG), _release("early_release"),
    ),
    "early_release_waits": Probe(
        "40", "Is a stage safe if it is released after a use of what was read?", "how stages are released", ARCHS,
        (PASSED,), _release("early_release_waits"),
    ),
    "register_counts": Probe(
        "50, section 5", "Does setmaxnreg work in a CTA of 256 threads?", "register counts of small tiles", ARCHS,
        (PASSED,), _registers,
    ),
    "tensor_map_pitch": Probe(
        "V4", "Are tensor maps right for rows with room between them in a small allocation?",
        "whether such operands are refused", ARCHS, (PASSED,), _pitched,
    ),
    "wgmma_wait": Probe(
        "wgmma", "Does one warp's wgmma.wait_group cover its whole warpgroup?", "who releases a stage", HOPPER,
        (PASSED, WRONG), _warpgroup_wait,
    ),
    **{
        f"mma_n{n}": Probe(
            "S1, 60", f"Does a block-scaled MMA take N = {n} at an even column of scales?",
            "which tiles may end a group", TENSOR_MEMORY, (PASSED,), _scaled(n, 0),
        )
        for n in (32, 96, 160, 192, 224, 256)
    },
    **{
        f"mma_n{n}_column1": Probe(
            "V1", f"Do scales of B at an odd column work with N = {n}? If not: a fault, or wrong without a word?",
            "whether tiles of 32 and 96 rows are allowed anywhere", TENSOR_MEMORY, (FAULT, WRONG), _scaled(n, 1),
        )
        for n in (32, 96)
    },
    "mma_n32_column2": Probe(
        "V1", "Do scales of B two columns on work with N = 32?", "tiles of 64 rows", TENSOR_MEMORY, (PASSED,),
        _scaled(32, 2),
    ),
    "pair_alloc": Probe(
        "V2", "May a pair allocate tensor memory before its cluster barrier?", "the order of a kernel's start",
        TENSOR_MEMORY, (PASSED,), _pair,
    ),
}  # fmt: skip
