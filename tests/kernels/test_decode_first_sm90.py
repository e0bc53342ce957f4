"""The sm_90a grouped GEMM after a launch that decodes the tokens, compared with the reference and the fused kernel."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cases
import device_groups_check
import pytest
import torch
from flat_parts import gemm, grouped_dual_gemm, grouped_gemm
from oracle import assert_bitwise_equal, bits
from sm90_check import (
    EMULATED,
    ROWS,
    assert_mmas_overlap,
    assert_same_bits_in_every_launch,
    assert_sizes_on_the_device_match,
    config,
    first,
    run,
    stream,
)

from nvfp4_cute import KernelConfig, dequantize
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.errors import ConfigError, UnsupportedProblem
from nvfp4_cute.formats.block_format import NVFP4
from nvfp4_cute.gpus.targets import H200
from nvfp4_cute.launch import workspace
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.plan import make_plan
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.planning.arch import ARCHS, sm90
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.reference import expand_operand

# An empty group, tiles of an odd number of 128 weights of which the last one is small, and K that ends within a K tile
# or a half of it. K is long enough to be divided among clusters, which share tiles of one, two and three of them.
LONG = cases.Case(
    "long", ((60, 264, 1152), (0, 64, 128), (9, 136, 1056), (20, 8, 208)), 7, has_alpha=True, padding="nan"
)
MANY = cases.Case("many", ((90, 1040, 384), (0, 64, 128), (33, 520, 1152), (5, 264, 128)), 5, padding="nan")
LIST = cases.Case(
    "list",
    ((60, 264, 288), (0, 64, 128), (9, 136, 144), (20, 8, 208), (8, 8, 112)),
    7,
    has_alpha=True,
    padding="nan",
)
# Tokens are decoded in blocks that differ from tiles: four blocks in the first group, and two in the second.
TALL = cases.Case("tall", ((500, 136, 288), (129, 8, 160)), 3)
SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("stream_k", [False, True])
def test_tiles_of_two_blocks(stream_k):
    operands = cases.make_operands(TALL)
    chosen = first(256, num_cta=2, stream_k=stream_k)
    with observe(check=True):
        actual = run(TALL, operands, "emulator:sm_90a", chosen)
    for got, want in zip(actual, run(TALL, operands, "reference"), strict=True):
        assert_bitwise_equal(got, want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("chosen", "mode"),
    [
        (first(48, num_cta=2), "random:1"),
        (first(16, num_cta=2), "eager"),
        pytest.param(first(32), "eager", marks=SLOW),
        pytest.param(first(64, num_ab_stage=2), "lazy", marks=SLOW),
        pytest.param(first(160, num_cta=2), "random:2", marks=SLOW),
        pytest.param(first(256), "random:3", marks=SLOW),
    ],
    ids=str,
)
def test_list(chosen, mode):
    operands = cases.make_operands(LIST)
    with observe(mode=mode, check=True) as observer:
        actual = run(LIST, operands, EMULATED, chosen)
    assert [stats.launches for stats in observer.stats] == [2]
    for got, want in zip(actual, run(LIST, operands, "reference"), strict=True):
        assert_bitwise_equal(got, want)


@pytest.mark.parametrize(
    ("chosen", "mode"),
    [
        (stream(48, num_cta=6), "random:1"),
        pytest.param(stream(32, num_cta=20), "eager", marks=SLOW),
        pytest.param(stream(80, num_cta=10), "lazy", marks=SLOW),
        pytest.param(stream(32), "random:2", marks=SLOW),
    ],
    ids=str,
)
def test_clusters_that_share_tiles(chosen, mode, monkeypatch):
    """Clusters pass sums to each other through memory. Some of its places stay unused."""
    poison, given = 0x5A, []

    def allocate(index, nbytes, counters):
        given.append(torch.full((nbytes,), poison, dtype=torch.uint8))
        return workspace.Workspace(given[0], given[0].data_ptr(), nbytes)

    monkeypatch.setattr(workspace, "_in_use", {})
    monkeypatch.setattr(workspace, "allocate", allocate)
    operands = cases.make_operands(LONG)
    with observe(mode=mode, check=True):
        actual = run(LONG, operands, EMULATED, chosen)
    for got, want in zip(actual, run(LONG, operands, "reference"), strict=True):
        assert_bitwise_equal(got, want)
    (memory,), num_cta = given, chosen.num_cta or H200.num_sms * sm90.ctas_per_sm(chosen)
    flag_bytes, sum_bytes = sm90.fixup_bytes(chosen, num_cta)
    assert (memory[:flag_bytes].view(torch.int32).view(num_cta, -1)[:, 0] == 1).all()
    sent = (memory[flag_bytes : flag_bytes + sum_bytes].view(num_cta, -1) != poison).any(1)
    assert sent.any() and not sent.all()
    assert (sent[::2] == sent[1::2]).all()  # both CTAs of a cluster


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "mode"),
    [(stream(32, num_cta=6), "random:1"), (stream(64, num_cta=4), "lazy")],
    ids=str,
)
def test_whole_tiles_come_first(chosen, mode):
    """Three waves of whole tiles with three clusters, one with two. One group's K is a ninth of another's."""
    operands = cases.make_operands(MANY)
    with observe(mode=mode, check=True):
        actual = run(MANY, operands, EMULATED, chosen)
    for got, want in zip(actual, run(MANY, operands, "reference"), strict=True):
        assert_bitwise_equal(got, want)


@pytest.mark.slow
def test_who_has_a_share_of_a_tile_has_k_tiles_of_it():
    """Five tiles of eight K tiles for four clusters.

    If each cluster took a whole tile first, some would get less than the minimum share of the last one.
    """
    case = cases.Case("shares", ((32, 5 * 256, 1024),), 6)
    operands = cases.make_operands(case)
    with observe(mode="random:1", check=True):
        (actual,) = run(case, operands, EMULATED, stream(32, num_cta=8))
    assert_bitwise_equal(actual, *run(case, operands, "reference"))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ragged", pytest.param("masked", marks=SLOW)])
@pytest.mark.parametrize(
    ("chosen", "mode"),
    [
        (stream(64, num_cta=6), "random:1"),
        pytest.param(stream(32, num_cta=2), "random:2", marks=SLOW),
        pytest.param(stream(32, num_cta=4), "eager", marks=SLOW),
        pytest.param(stream(192), "lazy", marks=SLOW),
    ],
    ids=str,
)
def test_clusters_that_share_tiles_of_sizes_on_the_device(form, chosen, mode):
    assert_sizes_on_the_device_match(form, chosen, mode, k=1280)


def test_more_work_than_is_counted_is_refused():
    problem = GroupedProblem(((1 << 20, 1 << 20, 1 << 20),), "list", torch.float16, False)
    with pytest.raises(
        UnsupportedProblem, match=r"groups of sizes \(1048576, .*: .* units of work, .* use stream_k=False"
    ):
        make_plan(problem, "sm_90a", 132, stream(256))


@pytest.mark.parametrize(("form", "tiles_m"), [("ragged", (62, 63)), ("masked", (31, 32))])
def test_more_work_than_is_counted_of_sizes_on_the_device_is_refused(form, tiles_m):
    """At most 63 tiles along M can be counted. In the ragged form, the first group may end one tile earlier."""
    fitting, large = (huge_task(form, 256 * tiles) for tiles in tiles_m)
    # MMAs of 256 tokens, 8 steps of 4, in each of 8192 K tiles and 2 more, and 128 tiles along N.
    work = 64 * 32 * 8194 * 128
    assert fitting.key(H200.gpu).config.stream_k
    with pytest.raises(
        UnsupportedProblem,
        match=rf"2 {form} groups, rows={256 * tiles_m[1]}, N=32768, K=1048576: .* up to {work} .* use stream_k=False",
    ):
        large.key(H200.gpu)
    assert replace(large, config=first(256)).key(H200.gpu).config.decode_first


def huge_task(form, rows, n=1 << 15, k=1 << 20):
    """Two groups of tensors without data."""

    def empty(*shape, dtype=torch.uint8):
        return torch.empty(shape, dtype=dtype, device="meta")

    batches = 2 if form == "masked" else 1
    a, b, out = (
        empty(batches, rows, k // 2),
        empty(2, n, k // 2),
        empty(batches, rows, n, dtype=torch.float16),
    )
    scales = empty(batches * (rows // 128 + 1) * 128 * k // 16), empty(2, n * k // 16)
    sizes = empty(2, dtype=torch.int32)
    sides = Operand(a, scales[0], NVFP4, rows, k, batches), Operand(b, scales[1], NVFP4, n, k, 2)
    problem = GroupedProblem(((rows, n, k),) * 2, form, torch.float16)
    return GroupedTask(problem, GroupedOperands(sides[:1], sides[1:], (out,), sizes=sizes), stream(256))


@pytest.mark.parametrize("form", ["ragged", pytest.param("masked", marks=SLOW)])
@pytest.mark.parametrize(
    ("chosen", "mode"),
    [(first(64, num_cta=2), "random:1"), pytest.param(first(192), "lazy", marks=SLOW)],
    ids=str,
)
def test_sizes_on_the_device(form, chosen, mode):
    assert_sizes_on_the_device_match(form, chosen, mode)


@pytest.mark.slow
def test_a_batch():
    case = cases.Case("batch", ((150, 200, 288),) * 3, has_alpha=True)
    a, b, a_scale, b_scale, alpha = cases.make_operands(case)
    operands = [torch.stack(a).permute(1, 2, 0), torch.stack(b).permute(1, 2, 0)]
    operands += [torch.stack(scale).unflatten(1, (-1, 5, 32, 4, 4)) for scale in (a_scale, b_scale)]
    with observe(mode="random:1", check=True) as observer:
        actual = gemm(*operands, alpha, backend=EMULATED, config=first(96, num_cta=2))
    assert [plan.problem.form for plan in observer.plans] == ["batched"]
    assert_bitwise_equal(actual, gemm(*operands, alpha, backend="reference"))


def decoded(a, a_scale):
    """Decoded rows in the kernel's order: (rows, K rounded up), fp16."""
    values = expand_operand(a, a_scale, "blocked") * 2.0**-14
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % sm90.TILE_K))
    # A K tile is four units of four words of eight values. It becomes a chunk of two values per unit for every word and
    # pair.
    units = values.view(len(values), -1, 4, 4, 8)[..., [[0, 2], [4, 6], [1, 3], [5, 7]]]
    return units.permute(0, 1, 3, 4, 2, 5).reshape(len(values), -1).half()


# With this maximum number of rows, a warp of the first launch takes two K tiles. At the end of K it takes one and a
# part, only a part, or one.
FEW = (0, 9, 1)


@pytest.mark.parametrize(
    ("form", "rows_of_groups", "slack", "k"),
    [
        ("ragged", ROWS, 9, 352),
        pytest.param("masked", ROWS, 9, 352, marks=SLOW),
        pytest.param("ragged", FEW, 840, 63 * 128 + 32, marks=SLOW),
        pytest.param("masked", FEW, 280, 64 * 128 + 96, marks=SLOW),
        pytest.param("masked", FEW, 280, 67 * 128, marks=SLOW),
        pytest.param("ragged", FEW, 260, 65 * 128, marks=SLOW),
    ],
)
def test_what_the_first_launch_writes(form, rows_of_groups, slack, k, monkeypatch):
    """The first launch writes every row of a group and zeros after the end of K, and nothing else."""
    monkeypatch.setattr(workspace, "_in_use", {})
    arguments = device_groups_check.operands(form, rows_of_groups, n=8, k=k, slack=slack)
    batches, rows = 1 if form == "ragged" else len(rows_of_groups), arguments["a"].shape[-2]
    pitch = -(-k // 128) * 128
    block_bytes = -(-k // 64) * 512
    memory = workspace.take(None, 0, batches * rows * pitch * 2).memory.fill_(0xFF).view(torch.float16)
    expected = memory.clone().view(batches, rows, pitch)
    with observe(mode="random:1", check=True):
        device_groups_check.run(arguments, EMULATED, config=first(64, num_cta=2))
    row = block = 0
    for group, m in enumerate(rows_of_groups):
        if m and form == "ragged":
            scale = arguments["a_scale"].view(-1, block_bytes)[block : block + -(-m // 128)].reshape(-1)
            expected[0, row : row + m] = decoded(arguments["a"][row : row + m], scale)
        elif m:
            scale = arguments["a_scale"][group][: -(-m // 128) * block_bytes]
            expected[group, :m] = decoded(arguments["a"][group, :m], scale)
        row, block = row + m, block + -(-m // 128)
    assert torch.equal(bits(memory), bits(expected.view(-1)))


@pytest.mark.slow
def test_sums_are_those_of_the_kernel_that_decodes_by_itself():
    """Also rounded sums, with memory that has to grow and with more memory than needed."""
    for sizes in (((20, 136, 640),), ((130, 136, 640), (40, 128, 288)), ((20, 136, 640),)):
        case = cases.Case("wide", sizes, 5, torch.float32, has_alpha=True, kind="wide")
        operands = cases.make_operands(case)
        expected = run(case, operands, EMULATED, config(64))
        for got, want in zip(run(case, operands, EMULATED, first(64)), expected, strict=True):
            assert_bitwise_equal(got, want)


@pytest.mark.slow
def test_two_products():
    """Products of two operands, with a tile that starts within a scale block."""
    sizes = ((70, 136, 256), (3, 192, 288))
    a, b, a_scale, b_scale, _ = cases.make_operands(cases.Case("dual", sizes, 5))
    _, b2, _, b2_scale, _ = cases.make_operands(cases.Case("dual", sizes, 6))
    alphas = [[2.0**-7] * 2, [-(2.0**-6)] * 2]
    expected, actual = (
        grouped_dual_gemm(
            a,
            b,
            b2,
            a_scale,
            b_scale,
            b2_scale,
            *alphas,
            backend=EMULATED,
            config=KernelConfig.from_name(name),
        )
        for name in ("t64x64x128_s0a1_swap", "t64x64x128_s0a1_swap_pre_p4")
    )
    for got, want in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, want)


@pytest.mark.slow
def test_quantized_results():
    case = cases.Case("quantized", ((70, 272, 256), (3, 64, 288)), 5)
    *operands, _ = cases.make_operands(case)
    expected, actual = (
        grouped_gemm(*operands, out_dtype="nvfp4", backend=EMULATED, config=chosen)
        for chosen in (config(64), first(64))
    )
    for got, want in zip(actual, expected, strict=True):
        assert torch.equal(got.data, want.data)
        assert torch.equal(dequantize(got), dequantize(want))


@pytest.mark.parametrize("tokens", [64, *(pytest.param(n, marks=SLOW) for n in (32, 128, 192, 256))])
@pytest.mark.parametrize("form", ["list", pytest.param("ragged", marks=SLOW)])
def test_machine_code(tokens, form):
    """No spills in either kernel. Tokens are multicast, and only the warp that loads them waits for the previous launch."""
    kernel = get_kernel(KernelKey("sm_90a", first(tokens), 2, torch.float16, True, form).validated())
    assert kernel.resources.stack_bytes == 0
    assert_mmas_overlap(kernel.cubin, "nvfp4_")
    assert kernel.ptx.count(".entry") == 2
    assert (
        kernel.ptx.count("griddepcontrol.launch_dependents") == kernel.ptx.count("griddepcontrol.wait") == 1
    )
    assert ".multicast::cluster" in kernel.ptx


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [32, 64, 128, 192, 256])
@pytest.mark.parametrize("form", ["list", "ragged"])
def test_machine_code_of_stream_k(tokens, form):
    """No spills. The flag is set after the wait for the previous launch, which clears it, as are the reads of tokens."""
    kernel = get_kernel(KernelKey("sm_90a", stream(tokens), 2, torch.float16, True, form).validated())
    assert kernel.resources.stack_bytes == 0
    assert_mmas_overlap(kernel.cubin, "nvfp4_")
    assert kernel.ptx.count("griddepcontrol.wait") == 2
    assert kernel.ptx.count("st.release.gpu") == kernel.ptx.count("ld.acquire.gpu") == 1


@pytest.mark.parametrize(
    "chosen, fix",
    [
        (config(64, stream_k=True), "use stream_k=False"),
        (first(8), "use N tile 16"),
        (first(40), "use N tile 48"),
        (first(64, split_k=2), "use split_k=1"),
        (first(64, num_cta=1), "launch at least as many"),
        (first(128, num_ab_stage=40), "use 2 to 5"),
        (first(128, num_ab_stage=1), "use 2 or more"),
        (first(256, num_ab_stage=40), "use 1 to 6"),
    ],
    ids=str,
)
def test_a_refused_config_says_why(chosen, fix):
    with pytest.raises(ConfigError, match=fix):
        KernelKey("sm_90a", chosen, 1, torch.float16, False).validated()


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch not in sm90.ARCHS])
def test_where_nothing_is_decoded_it_is_refused(arch):
    with pytest.raises(ConfigError, match="decode_first=True: .* use decode_first=False"):
        KernelKey(arch, KernelConfig((128, 128, 256), decode_first=True), 1, torch.float16, False).validated()


GPU = pytest.mark.gpu("sm_90a")


@GPU
@pytest.mark.parametrize("tokens", [32, 48, 64, 96, 128, 160, 192, 240, 256])
@pytest.mark.parametrize("stream_k", [False, True])
def test_list_on_the_gpu(tokens, stream_k):
    case = LONG if stream_k else LIST
    operands = cases.make_operands(case)
    actual = run(case, operands, "cuda", first(tokens, stream_k=stream_k))
    for got, want in zip(actual, run(case, operands, "reference"), strict=True):
        assert_bitwise_equal(got, want)


@GPU
@pytest.mark.parametrize("tokens", [64, 128, 256])
@pytest.mark.parametrize("stream_k", [False, True])
def test_every_launch_gives_the_same_bits_on_the_gpu(tokens, stream_k):
    assert_same_bits_in_every_launch(first(tokens, stream_k=stream_k))


def on_gpu(arguments):
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


@GPU
@pytest.mark.parametrize("form", ["ragged", "masked"])
@pytest.mark.parametrize("chosen", [first(64), stream(64)], ids=str)
def test_repeated_calls_and_graphs_on_the_gpu(form, chosen):
    """Sizes and operands change between replays. A graph has its own memory, so calls in between do not change its results."""
    given, other = (
        device_groups_check.operands(form, rows, n=200, k=1280, slack=9, seed=seed)
        for seed, rows in enumerate((ROWS, ROWS[::-1]))
    )
    wanted = [device_groups_check.run(arguments, "reference") for arguments in (given, other)]
    arguments = on_gpu(given)
    for _ in range(3):
        actual = device_groups_check.run(arguments, "cuda", config=chosen)
        assert torch.equal(bits(actual.cpu()), bits(wanted[0]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = device_groups_check.run(arguments, "cuda", config=chosen)
    for turn in (1, 0, 1):
        for name, tensor in (given, other)[turn].items():
            if isinstance(tensor, torch.Tensor) and name != "out":
                arguments[name].copy_(tensor)
        graph.replay()
        device_groups_check.run(on_gpu((given, other)[1 - turn]), "cuda", config=chosen)
        assert torch.equal(bits(captured.cpu()), bits(wanted[turn]))


@GPU
def test_a_repeated_call_allocates_nothing_on_the_gpu():
    arguments = on_gpu(device_groups_check.operands("ragged", ROWS, n=200, k=320))
    for _ in range(3):
        grouped_gemm(**arguments, config=first(64))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    grouped_gemm(**arguments, config=first(64))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@GPU
def test_threads_on_one_queue_on_the_gpu():
    """Launches of two threads alternate. Each thread has its own memory."""
    problems = [device_groups_check.operands("ragged", ROWS, n=200, k=320, seed=seed) for seed in range(4)]

    def work(given):
        arguments, want = on_gpu(given), device_groups_check.run(given, "reference")
        for _ in range(50):
            actual = device_groups_check.run(arguments, "cuda", config=first(64))
            assert torch.equal(bits(actual.cpu()), bits(want))

    with ThreadPoolExecutor(len(problems)) as pool:
        list(pool.map(work, problems))
