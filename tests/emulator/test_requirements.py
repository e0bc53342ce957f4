"""Instructions of each target, as the assembler of CUDA 13.0 accepts them."""

import pytest

from nvfp4_cute.emulator.fronts.driver import run_ptx
from nvfp4_cute.emulator.isa.requirements import architecture, missing_on
from nvfp4_cute.emulator.ptx import Inst
from nvfp4_cute.errors import EmulatorError

TARGETS = (
    "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_100f", "sm_103a", "sm_103f", "sm_110a", "sm_120",
    "sm_120a", "sm_120f", "sm_121a",
)  # fmt: skip
SINCE_80 = set(TARGETS)
SINCE_86 = SINCE_80 - {"sm_80"}
SINCE_89 = SINCE_86 - {"sm_86"}
SINCE_90 = SINCE_89 - {"sm_89"}
SINCE_100 = SINCE_90 - {"sm_90", "sm_90a"}
TENSOR = {"sm_100a", "sm_100f", "sm_103a", "sm_103f", "sm_110a"}
BLACKWELL = TENSOR | {"sm_120a", "sm_120f", "sm_121a"}
GEFORCE = {"sm_120a", "sm_120f", "sm_121a"}

ACCEPTED = {
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32": TENSOR,
    "tcgen05.mma.cta_group::1.kind::f16": TENSOR,
    "tcgen05.mma.cta_group::1.kind::i8": {"sm_100a", "sm_110a"},
    "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16": TENSOR,
    "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X": {"sm_100a", "sm_103a", "sm_110a"},
    "tcgen05.mma.ws.cta_group::1.kind::f16": TENSOR,
    "tcgen05.shift.cta_group::1.down": {"sm_100a", "sm_103a", "sm_110a"},
    "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64": TENSOR,
    "tcgen05.ld.sync.aligned.32x32b.x1.b32": TENSOR,
    "tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32": {"sm_103a", "sm_103f", "sm_110a"},
    "wgmma.fence.sync.aligned": {"sm_90a"},
    "setmaxnreg.inc.sync.aligned.u32": BLACKWELL | {"sm_90a"},
    "elect.sync": SINCE_90,
    "griddepcontrol.wait": SINCE_90,
    "barrier.cluster.arrive": SINCE_90,
    "mbarrier.init.shared.b64": SINCE_80,
    "mbarrier.try_wait.shared.b64": SINCE_90,
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64": SINCE_90,
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": SINCE_90,
    "cp.async.bulk.global.shared::cta.bulk_group.cp_mask": SINCE_100,
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes": SINCE_90,
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2": TENSOR,
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes": SINCE_100,
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes": TENSOR,
    "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group": TENSOR,
    "tensormap.replace.tile.global_address.global.b1024.b64": BLACKWELL | {"sm_90a"},
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128": SINCE_100,
    "clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.multicast::cluster::all.b128": BLACKWELL,
    "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32": GEFORCE,
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3": GEFORCE,
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32": SINCE_89,
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": SINCE_80,
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16": SINCE_80,
    "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8": BLACKWELL,
    "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64": BLACKWELL,
    "stmatrix.sync.aligned.m8n8.x1.shared.b16": SINCE_90,
    "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8": BLACKWELL,
    "redux.sync.min.f32": {"sm_100a", "sm_100f", "sm_103a", "sm_103f"},
    "redux.sync.min.u32": SINCE_80,
    "cvt.rn.satfinite.e4m3x2.f32": SINCE_89,
    "cvt.rn.satfinite.e2m1x2.f32": BLACKWELL,
    "cvt.rn.bf16x2.ue8m0x2": BLACKWELL,
    "cvt.rs.satfinite.e4m3x4.f32": {"sm_100a", "sm_103a"},
    "cvt.rn.bf16x2.f32": SINCE_80,
    "fma.rn.f32x2": SINCE_100,
    "add.rn.f32.f16": SINCE_100,
    "ld.global.v8.b32": SINCE_100,
    "ld.global.v4.b64": SINCE_100,
    "ld.global.v4.b32": SINCE_80,
    "red.global.add.v4.f32": SINCE_90,
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32": SINCE_90,
    "st.async.mmio.release.sys.global.b32": SINCE_100,
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32": SINCE_90,
    "st.bulk.weak.shared::cta": SINCE_100,
    "fence.proxy.async": SINCE_90,
    "cp.async.ca.shared.global": SINCE_80,
    "cp.async.cg.shared.global.L2::cache_hint": SINCE_80,
    "cp.async.mbarrier.arrive.noinc.shared.b64": SINCE_80,
    "mbarrier.test_wait.parity.shared.b64": SINCE_80,
    "mbarrier.arrive.expect_tx.shared.b64": SINCE_90,
    "mbarrier.arrive.release.cluster.shared::cta.b64": SINCE_90,
    "ld.acquire.gpu.global.b32": SINCE_80,
    "ld.acquire.cluster.global.b32": SINCE_90,
    "ld.shared::cluster.b32": SINCE_90,
    "st.release.cluster.global.b32": SINCE_90,
    "red.release.gpu.global.add.u32": SINCE_80,
    "red.release.cluster.global.add.u32": SINCE_90,
    "atom.global.add.noftz.f16x2": SINCE_80,
    "atom.global.add.noftz.bf16x2": SINCE_90,
    "atom.global.cas.b128": SINCE_90,
    "fence.acq_rel.gpu": SINCE_80,
    "fence.acq_rel.cluster": SINCE_90,
    "fence.proxy.tensormap::generic.acquire.gpu": SINCE_90,
    "prefetch.tensormap": SINCE_90,
    "prefetch.global.L2::evict_last": SINCE_80,
    "isspacep.shared::cluster": SINCE_90,
    "add.rn.bf16x2": SINCE_90,
    "mul.rn.bf16": SINCE_90,
    "sub.rn.bf16x2": SINCE_90,
    "fma.rn.bf16x2": SINCE_80,
    "fma.rn.oob.f16x2": SINCE_90,
    "mul.rn.f16x2": SINCE_80,
    "max.NaN.bf16x2": SINCE_80,
    "max.xorsign.abs.bf16x2": SINCE_86,
    "min.relu.s32": SINCE_90,
    "max.u16x2": SINCE_90,
    "ex2.approx.ftz.bf16x2": SINCE_90,
    "tanh.approx.f16x2": SINCE_80,
    "tanh.approx.bf16x2": SINCE_90,
    "setp.lt.bf16": SINCE_90,
    "cvt.f32.bf16": SINCE_80,
    "cvt.rn.bf16.f16": SINCE_90,
    "cvt.rni.s32.bf16": SINCE_90,
    "cvt.rna.tf32.f32": SINCE_80,
    "cvt.rn.tf32.f32": SINCE_90,
    "cvt.rn.satfinite.tf32.f32": SINCE_100,
    "movmatrix.sync.aligned.m8n8.trans.b16": SINCE_80,
}


@pytest.mark.parametrize("opcode", ACCEPTED)
def test_targets(opcode: str) -> None:
    first, *mods = opcode.split(".")
    inst = Inst(first, tuple(mods), (), opcode, 1)
    accepted = {name for name in TARGETS if missing_on((inst.opcode, *inst.mods), architecture(name)) is None}
    assert accepted == ACCEPTED[opcode]


def test_old_names_mean_the_same() -> None:
    assert str(architecture("sm_101a")) == "sm_110a"
    assert architecture("sm_90a, debug") == architecture("sm_90a")


@pytest.mark.parametrize(
    "arch, line, message",
    [
        (
            "sm_90a",
            "tcgen05.fence::before_thread_sync;",
            "sm_90a has no tcgen05; it needs sm_100a or sm_100f or",
        ),
        ("sm_120a", "tcgen05.fence::before_thread_sync;", "sm_120a has no tcgen05"),
        (
            "sm_100a",
            "wgmma.fence.sync.aligned;",
            "sm_100a has no wgmma; it needs sm_90a .PTX ISA, wgmma, Target ISA Notes.$",
        ),
        ("sm_80", "griddepcontrol.wait;", "sm_80 has no griddepcontrol; it needs sm_90 or later"),
        (
            "sm_80",
            "mbarrier.arrive.shared.b64 %rd1, [%rd2], 2;",
            "sm_80 has no mbarrier.arrive with a count; it needs sm_90",
        ),
        (
            "sm_90a",
            "max.f32 %r1, %r2, %r3, %r4;",
            "sm_90a has no max of three values; it needs sm_100 or later",
        ),
        ("sm_86", "mov.u32 %r1, %cluster_ctarank;", "sm_86 has no %cluster_ctarank; it needs sm_90 or later"),
    ],
)
def test_a_kernel_that_would_not_assemble_does_not_run(
    arch: str, line: str, message: str, ptx_kernel
) -> None:
    with pytest.raises(EmulatorError, match=message) as caught:
        run_ptx(ptx_kernel(line, 0, arch=arch))
    assert "PTX line 13: `" in str(caught.value)
