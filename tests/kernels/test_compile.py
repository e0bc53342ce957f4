"""The kernels compile for every architecture without a GPU. Checks properties of the machine code."""

import re

import pytest
import torch

from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.compiler import compile_jit, table_pointer
from nvfp4_cute.compile.host_code import TENSOR_MAP, pass_maps_in_place
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.emulator.cubin import read_machine_code, read_resources
from nvfp4_cute.errors import ConfigError, UnsupportedTarget
from nvfp4_cute.planning.arch import base, sm100
from nvfp4_cute.planning.config import KernelConfig

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def compiled(arch="sm_100a", num_groups=2, dtype=torch.float16, has_alpha=True, config=None):
    return get_kernel(KernelKey(arch, config or KernelConfig(), num_groups, dtype, has_alpha).validated())


def test_products_of_hopper_need_a_newer_dsl(monkeypatch):
    monkeypatch.setattr("nvfp4_cute.kernels.common.versions.VERSION", (4, 7))
    with pytest.raises(
        UnsupportedTarget, match=r"sm_90a: products need CuTe DSL 4\.8, and here is 4\.7; pip install"
    ):
        KernelKey("sm_90a", KernelConfig(swap_ab=True), 1, torch.bfloat16, False).make_kernel()
    KernelKey("sm_100a", KernelConfig(), 1, torch.bfloat16, False).validated().make_kernel()


@pytest.mark.parametrize(
    "num_groups",
    [8, pytest.param(1, marks=pytest.mark.slow), pytest.param(base.MAX_LIST_GROUPS, marks=pytest.mark.slow)],
)
def test_descriptors_are_kernel_parameters(num_groups):
    kernel = compiled(num_groups=num_groups)
    entry = kernel.ptx[kernel.ptx.index(".visible .entry") : kernel.ptx.index(".reqntid")]
    assert entry.count(".align 64 .b8") == 4 * num_groups
    assert kernel.resources.stack_bytes == 0
    # The device neither writes nor copies a tensor map.
    assert set(re.findall(r"\S*tensormap\S*", kernel.ptx)) == {"prefetch.tensormap"}


@pytest.mark.parametrize(
    ("arch", "maps", "config"),
    [
        ("sm_100a", 4, KernelConfig()),
        (
            "sm_90a",
            3,
            KernelConfig.from_name("t128x64x128_s0a1_swap_pre"),
        ),  # of weights, their scales, decoded tokens
    ],
)
def test_launches_read_tensor_maps_where_they_were_encoded(arch, maps, config):
    """Results show whether the maps are right, but only the module shows that none is copied."""
    import cuda.bindings.driver as cuda

    key = KernelKey(arch, config, 2, torch.float16, False).validated()
    host, *_ = compile_jit(arch, key.make_kernel(), table_pointer(0), cuda.CUstream(0), no_jit_engine=True)
    copies = [
        line for line in str(host.ir_module).splitlines() if TENSOR_MAP in line and "llvm.store" in line
    ]
    assert len(copies) == 2 * maps
    assert pass_maps_in_place(host.ir_module) == 2 * maps
    assert TENSOR_MAP not in "".join(
        line for line in str(host.ir_module).splitlines() if "llvm.store" in line or "llvm.alloca" in line
    )
    assert pass_maps_in_place(host.ir_module) == 0


def test_two_tma_an_operand_whatever_the_group_count():
    """One for the first K tiles, whose stages are empty, and one for the others."""
    for num_groups in (1, 8):
        assert len(re.findall(r"cp\.async\.bulk\.tensor", compiled(num_groups=num_groups).ptx)) == 2 * 4


def test_the_block_scaled_mma_is_used():
    ptx = compiled().ptx
    assert len(re.findall(r"tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\.block_scale\.block16", ptx)) == 4
    assert "tcgen05.cp.cta_group::1.32x128b.warpx4" in ptx


def test_first_descriptors_are_prefetched():
    assert compiled(num_groups=8).ptx.count("prefetch.tensormap") == 4


def test_nothing_is_read_before_the_previous_kernel_has_ended():
    """Programmatic dependent launch: set-up overlaps the previous kernel, accesses of global memory wait for its end."""
    ptx = compiled().ptx
    assert ptx.count("griddepcontrol.launch_dependents") == 1
    load, epilogue = (match.start() for match in re.finditer(r"griddepcontrol\.wait", ptx))
    assert ptx.index("mbarrier.init") < load < ptx.index("cp.async.bulk.tensor") < epilogue
    assert not re.search(r"(ld|st)\.global", ptx[:epilogue])


def test_the_next_slices_are_read_while_one_is_stored():
    """Two reads precede the loop over pairs of slices.

    An iteration waits, stores the first slice, starts the next two reads, and stores the second slice.

    The first tile's loop starts with an empty iteration, after which the tile's first reads follow.
    """
    ptx = compiled().ptx
    events = re.findall(r"tcgen05\.ld\.|tcgen05\.wait::ld|st\.global", ptx)
    reads, stores = ["tcgen05.ld."] * 2, {"st.global"}
    second = events.index("tcgen05.ld.", 2)
    assert events[:3] == [*reads, "tcgen05.wait::ld"] and set(events[3:second]) == stores
    assert events[second : second + 2] == reads and set(events[second + 2 : -2]) == stores
    assert events[-2:] == reads


def test_pipeline_state_survives_the_tile_loop():
    """A state that the tracer lost appears as a wait with a literal parity. Only the wait for unused tensor memory has one."""
    waits = re.findall(r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[[^\]]+\], (\S+),", compiled().ptx)
    assert len(waits) >= 5
    assert [parity for parity in waits if not parity.startswith("%r")] == ["0"]


def test_symbol_starts_with_the_readable_name():
    kernel = compiled()
    assert f".entry {kernel.key.to_name()}"[:100] in kernel.ptx


def test_keys_of_distinct_variants_have_distinct_names():
    keys = [
        KernelKey(arch, config, groups, dtype, alpha).validated()
        for arch in sm100.ARCHS
        for config in (KernelConfig(), KernelConfig(num_ab_stage=2))
        for groups in (1, 2)
        for dtype in DTYPES
        for alpha in (False, True)
    ]
    assert len({key.to_name() for key in keys}) == len(set(keys)) == len(keys)


def test_the_number_of_ctas_is_not_compiled_in():
    assert compiled(config=KernelConfig(num_cta=3)) is compiled(config=KernelConfig(num_cta=5))


def test_unknown_arch_names_the_known_ones():
    with pytest.raises(
        UnsupportedTarget, match="no grouped GEMM kernel for sm_75; there is one for sm_90a, sm_100a"
    ):
        KernelKey("sm_75", KernelConfig(), 1, torch.float16, False).validated()


def test_a_refused_config_says_why():
    with pytest.raises(ConfigError, match="use 1 to 6"):
        KernelKey("sm_100a", KernelConfig(num_ab_stage=9), 1, torch.float16, False).validated()


def test_what_is_no_cubin_is_refused():
    with pytest.raises(ValueError, match="not an ELF file"):
        read_resources(b"not a cubin")


def test_machine_code_by_name():
    kernel = compiled()
    (found,) = (made for name, made in read_machine_code(kernel.cubin).items() if name in kernel.ptx)
    assert found.registers == kernel.resources.registers
    assert found.whole.stalls >= found.whole.instructions > 100
