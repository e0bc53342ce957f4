"""The list form: sizes, bytes, normalized operands; every bad input is refused by rule, value and fix, `out` untouched."""

from types import SimpleNamespace

import pytest
import torch
from list_checks import check_list_operands
from oracle import bits, poisoned, unwritten

from nvfp4_cute.errors import UnsupportedProblem
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.problem import INT32_MAX, GroupedProblem

SIZES = ((200, 96, 128), (40, 72, 256))


def checked(**args):
    """Returns the problem, and the operands of launches by name: tensors of all groups."""
    problem, operands = check_list_operands(**args)
    sides = {"a": operands.a, "b": operands.b}
    tensors = {name: [x.data for x in side] for name, side in sides.items()}
    tensors |= {f"{name}_scale": [x.scale for x in side] for name, side in sides.items()}
    return problem, SimpleNamespace(**tensors, out=operands.out, alpha=operands.alpha)


def fp4(rows, k):
    return torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8)


def blocked(rows, k):
    return to_blocked(torch.randint(0, 127, (rows, k // 16), dtype=torch.uint8)).flatten()


def arguments(sizes=SIZES, out_dtype=torch.float16):
    """Returns keyword arguments that pass every check, with poisoned outputs."""
    return {
        "a": [fp4(m, k) for m, _, k in sizes],
        "b": [fp4(n, k) for _, n, k in sizes],
        "a_scale": [blocked(m, k) for m, _, k in sizes],
        "b_scale": [blocked(n, k) for _, n, k in sizes],
        "alpha": torch.ones(len(sizes)),
        "out": [poisoned(m, n, dtype=out_dtype) for m, n, _ in sizes],
        "out_dtype": out_dtype,
    }


def replaced(name, change, group=1):
    """Returns arguments in which ``change`` replaced one tensor of a group."""
    args = arguments()
    args[name][group] = change(args[name][group])
    return args


def refused(args, error, *facts):
    """Checks that ``error`` is raised, that its message contains every fact, and that the given outputs are untouched."""
    outs = [t for t in (args["out"] if args["out"] is not None else ()) if t.device.type == "cpu"]
    before = [bits(t).clone() for t in outs]
    with pytest.raises(error) as caught:
        check_list_operands(**args)
    assert type(caught.value) is error
    for fact in facts:
        assert str(fact) in str(caught.value), f"{fact!r} is not in: {caught.value}"
    assert all(torch.equal(bits(out), copy) for out, copy in zip(outs, before, strict=True))


# ---- what a problem is -----------------------------------------------------------------------------------------


def test_flops_and_bytes_count_real_rows():
    problem = GroupedProblem(((40, 128, 256), (0, 128, 256)), "list", torch.float16, False)
    assert problem.num_groups == 2
    assert problem.flops == 2 * 40 * 128 * 256
    # The empty group still has its B and scales in memory.
    assert problem.bytes == (40 + 128 + 128) * (128 + 16) + 2 * 40 * 128


def test_out_dtype_counts_in_bytes():
    half, single = (GroupedProblem(((8, 16, 32),), out_dtype=d) for d in (torch.bfloat16, torch.float32))
    assert single.bytes - half.bytes == 2 * 8 * 16


def test_problem_prints_its_sizes():
    text = str(GroupedProblem(((40, 128, 256), (1, 2, 32)), "list", torch.float16, True))
    for part in ("list", "2 groups", "40x128x256", "1x2x32", "float16", "alpha"):
        assert part in text


# ---- what is accepted ------------------------------------------------------------------------------------------


def test_views_share_memory_and_nothing_is_written():
    args = arguments()
    problem, operands = checked(**args)
    assert problem == GroupedProblem(SIZES, "list", torch.float16, True)
    for name in ("a", "b", "a_scale", "b_scale", "out"):
        for given, normalised in zip(args[name], getattr(operands, name), strict=True):
            assert normalised.data_ptr() == given.data_ptr()
    assert operands.alpha is args["alpha"]
    assert all(unwritten(out).all() for out in args["out"])


def test_operands_are_normalised():
    args = arguments()
    args["a"][0] = args["a"][0].view(torch.float4_e2m1fn_x2).unsqueeze(0).permute(1, 2, 0)
    args["b"][1] = args["b"][1].view(torch.float4_e2m1fn_x2)
    args["a_scale"][0] = args["a_scale"][0].view(torch.float8_e4m3fn).view(2, 2, 32, 4, 4)
    args["b_scale"][1] = args["b_scale"][1].view(1, 1, 4, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
    args["out"][0] = args["out"][0].unsqueeze(0).permute(1, 2, 0)
    _, operands = checked(**args)
    for group, (m, n, k) in enumerate(SIZES):
        for tensor, rows in ((operands.a[group], m), (operands.b[group], n)):
            assert tensor.dtype == torch.uint8 and tensor.shape == (rows, k // 2)
        for tensor, rows in ((operands.a_scale[group], m), (operands.b_scale[group], n)):
            assert tensor.dtype == torch.uint8 and tensor.shape == (-(-rows // 128) * (k // 64) * 512,)
        assert operands.out[group].shape == (m, n)


def test_sizes_of_one_may_have_any_stride():
    """Strides of dimensions of extent 1 are never used. torch leaves them arbitrary, but tensor maps do not."""
    args = arguments(((1, 1, 256),))
    args["a"][0] = torch.zeros(300, dtype=torch.uint8)[:256].as_strided((1, 128, 1), (7, 1, 3))
    args["out"][0] = poisoned(64, dtype=torch.float16)[:1].as_strided((1, 1, 1), (5, 9, 2))
    _, operands = checked(**args)
    assert operands.a[0].stride() == (128, 1)
    assert operands.out[0].stride() == (1, 1)


def test_rows_may_lie_apart():
    args = arguments(((40, 24, 48),))
    args["a"][0] = torch.zeros(40, 64, dtype=torch.uint8)[:, :24]
    args["b"][0] = torch.zeros(24, 32, dtype=torch.uint8)[:, :24]
    args["out"][0] = poisoned(40, 100, dtype=torch.float16)[:, 3:27]
    problem, operands = checked(**args)
    assert problem.sizes == ((40, 24, 48),)
    strides = [t[0].stride(0) for t in (operands.a, operands.b, operands.out)]
    assert strides == [64, 32, 100]


def test_out_is_allocated_where_none_is_given():
    args = arguments(out_dtype=torch.float32) | {"out": None}
    _, operands = checked(**args)
    assert [(t.shape, t.dtype) for t in operands.out] == [((m, n), torch.float32) for m, n, _ in SIZES]


@pytest.mark.parametrize("sizes", [((0, 64, 128), (8, 64, 128)), ((8, 0, 128),), ((0, 0, 32),)])
def test_groups_may_be_empty(sizes):
    problem, operands = checked(**arguments(sizes))
    assert problem.sizes == sizes
    assert [tuple(t.shape) for t in operands.out] == [(m, n) for m, n, _ in sizes]


def test_rowmajor_scales_are_converted():
    args, plain = arguments(), [torch.randint(0, 127, (m, k // 16), dtype=torch.uint8) for m, _, k in SIZES]
    other = [torch.zeros(n, k // 16, 1, dtype=torch.uint8).view(torch.float8_e4m3fn) for _, n, k in SIZES]
    _, operands = checked(**args | {"a_scale": plain, "b_scale": other, "scale_layout": "rowmajor"})
    for given, converted in zip(plain, operands.a_scale, strict=True):
        assert torch.equal(converted, to_blocked(given).flatten())


def test_alpha_may_be_numbers_or_none():
    _, operands = checked(**arguments() | {"alpha": [0.5, 3]})
    assert operands.alpha.dtype == torch.float32 and operands.alpha.tolist() == [0.5, 3.0]
    problem, operands = checked(**arguments() | {"alpha": None})
    assert operands.alpha is None and not problem.has_alpha


def test_outputs_may_interleave_in_one_buffer():
    args, buffer = arguments(((40, 64, 128), (33, 64, 128))), poisoned(40, 128, dtype=torch.float16)
    args["out"] = [buffer[:, :64], buffer[:33, 64:]]
    check_list_operands(**args)


def test_outputs_may_follow_each_other_and_the_inputs():
    args, store = arguments(((16, 32, 64),) * 2), torch.zeros(4096, dtype=torch.uint8)
    args["a"][0] = store[:512].view(16, 32)
    args["out"] = [store[512 + 1024 * g :][:1024].view(torch.float16).view(16, 32) for g in range(2)]
    check_list_operands(**args)


# ---- bad input: one rule each ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "b"])
def test_operand_dtype(name):
    args = replaced(name, lambda t: t.view(torch.int8))
    refused(args, TypeError, f"group 1: {name}", "int8", "uint8", "float4_e2m1fn_x2")


@pytest.mark.parametrize("name", ["a_scale", "b_scale"])
def test_scale_dtype(name):
    args = replaced(name, lambda t: t.view(torch.float8_e4m3fnuz))
    refused(args, TypeError, f"group 1: {name}", "float8_e4m3fnuz", "float8_e4m3fn", "uint8")


def test_rowmajor_scale_dtype():
    args = arguments() | {"scale_layout": "rowmajor"}
    args["a_scale"] = [torch.ones(m, k // 16) for m, _, k in SIZES]
    refused(args, TypeError, "group 0: a_scale", "float32", "float8_e4m3fn", "uint8")


def test_out_dtype_unsupported():
    refused(arguments() | {"out_dtype": torch.float64}, TypeError, "out_dtype", "float64", "bfloat16")


def test_out_dtype_differs_from_out():
    args = replaced("out", lambda t: t.to(torch.bfloat16))
    refused(args, TypeError, "group 1: out", "bfloat16", "float16", "pass out_dtype=torch.bfloat16")


def test_scale_layout_unknown():
    refused(arguments() | {"scale_layout": "swizzled"}, ValueError, "swizzled", "blocked", "rowmajor")


@pytest.mark.parametrize("name", ["a", "b", "a_scale", "b_scale", "out"])
def test_single_tensor_instead_of_a_list(name):
    args = arguments()
    refused(args | {name: args[name][0]}, TypeError, f"{name} is a single tensor", f"[{name}]")


def test_other_container_instead_of_a_list():
    refused(arguments() | {"a": {0: fp4(1, 32)}}, TypeError, "a is a dict", "list or tuple")


def test_entry_that_is_no_tensor():
    refused(replaced("b", lambda t: t.numpy()), TypeError, "group 1: b", "ndarray", "torch.Tensor")


def test_empty_lists():
    empty = {name: [] for name in ("a", "b", "a_scale", "b_scale", "alpha", "out")}
    refused(arguments() | empty, ValueError, "empty list", "at least one group")


@pytest.mark.parametrize("name", ["b", "a_scale", "b_scale", "out"])
def test_list_lengths(name):
    args = arguments()
    refused(args | {name: args[name][:1]}, ValueError, f"{name} has 1 entries", "a has 2", "one per group")


@pytest.mark.parametrize("shape", [(40,), (40, 128, 2), (1, 40, 128, 1)])
def test_operand_rank(shape):
    args = replaced("a", lambda t: torch.zeros(shape, dtype=torch.uint8))
    refused(args, ValueError, "group 1: a", list(shape), "[M, K/2] or [M, K/2, 1]")


def test_k_mismatch():
    args = replaced("b", lambda t: fp4(72, 192))
    refused(args, ValueError, "group 1", "a has K=256", "b has K=192", "same K")


def test_k_zero():
    args = arguments()
    args["a"][0], args["b"][0] = fp4(200, 0), fp4(96, 0)
    refused(args, UnsupportedProblem, "group 0: a", "K=0", "at least 16")


def test_k_not_a_multiple_of_the_block():
    args = arguments()
    args["a"][0], args["b"][0] = fp4(200, 100), fp4(96, 100)
    refused(
        args, ValueError, "group 0: a", "K=100 is not a multiple of 16 (NVFP4 block size)", "pad K to 112"
    )


def test_row_pitch_not_a_multiple_of_16_bytes():
    args = arguments(((40, 24, 48),))
    refused(args, ValueError, "group 0: a (K=48)", "24 bytes", "multiple of 16", "buffer[:, :24]")


def test_rows_overlap():
    args = replaced("a", lambda t: t[:1].expand(40, 128))
    refused(args, ValueError, "group 1: a", "pitch of 0 bytes", "rows of 128", ".contiguous()")


@pytest.mark.parametrize("name", ["a", "b"])
def test_operand_not_k_major(name):
    args = replaced(name, lambda t: t.t().contiguous().t())
    refused(args, ValueError, f"group 1: {name}", "stride", "K-major", ".contiguous()")


@pytest.mark.parametrize("name", ["a", "b"])
def test_operand_pointer_alignment(name):
    args = replaced(
        name, lambda t: torch.zeros(t.numel() + 64, dtype=torch.uint8)[8:][: t.numel()].view_as(t)
    )
    refused(args, ValueError, f"group 1: {name}", "8, not a multiple of 16", "TMA", ".clone()")


@pytest.mark.parametrize("name", ["a_scale", "b_scale"])
def test_scale_pointer_alignment(name):
    args = replaced(name, lambda t: torch.zeros(t.numel() + 64, dtype=torch.uint8)[4:][: t.numel()])
    refused(args, ValueError, f"group 1: {name}", "4, not a multiple of 16", "TMA", ".clone()")


def test_out_pointer_alignment():
    store = torch.zeros(40 * 72 * 2 + 2, dtype=torch.uint8)
    odd = torch.empty(0, dtype=torch.float16).set_(store.untyped_storage()[1:-1], 0, (40, 72))
    refused(replaced("out", lambda t: odd), ValueError, "group 1: out", "not a multiple of 2", "natural")


@pytest.mark.parametrize("name, rows", [("a_scale", 40), ("b_scale", 72)])
def test_scale_count(name, rows):
    """40 and 72 rows are padded to 128, and K=256 to 16 columns: 2048 scales."""
    args = replaced(name, lambda t: t[:1024])
    refused(
        args, ValueError, f"group 1: {name}", f"{rows} rows", "K=256", "[2048]", "1, 4, 32, 4, 4", "(1024,)"
    )


def test_rowmajor_scale_where_blocked_is_expected():
    args = replaced("a_scale", lambda t: torch.zeros(40, 16, dtype=torch.uint8))
    refused(args, ValueError, "group 1: a_scale", "(40, 16)", 'scale_layout="rowmajor"')


def test_blocked_scale_not_contiguous():
    args = replaced("a_scale", lambda t: torch.zeros(4096, dtype=torch.uint8)[::2])
    refused(args, ValueError, "group 1: a_scale", "strides (2,)", ".contiguous()")


def test_rowmajor_scale_shape():
    scales = {
        "a_scale": [torch.zeros(m, k // 16, dtype=torch.uint8) for m, _, k in SIZES],
        "b_scale": [torch.zeros(n, k // 16 + 1, dtype=torch.uint8) for _, n, k in SIZES],
    }
    args = arguments() | scales | {"scale_layout": "rowmajor"}
    refused(args, ValueError, "group 0: b_scale", [96, 9], [96, 8], "N=96, K=128", "scale_layout='blocked'")


@pytest.mark.parametrize("shape", [(40, 73), (41, 72), (72, 40), (40 * 72,), (1, 40, 72)])
def test_out_shape(shape):
    args = replaced("out", lambda t: poisoned(*shape, dtype=torch.float16))
    refused(args, ValueError, "group 1: out", list(shape), [40, 72], [40, 72, 1])


def test_out_of_neither_layout():
    args = replaced("out", lambda t: poisoned(80, 144, dtype=torch.float16)[::2, ::2])
    refused(args, ValueError, "group 1: out", "stride 2 in N", "row-major", "torch.empty(40, 72)")


def test_one_out_with_contiguous_columns_asks_for_all_of_them():
    args = replaced("out", lambda t: poisoned(72, 40, dtype=torch.float16).t())
    refused(args, ValueError, "group 0: out", "in M", "column-major")


def test_outs_with_contiguous_columns():
    args = arguments()
    args["out"] = [
        poisoned(t.shape[1], t.shape[0] + 8, dtype=t.dtype)[:, : t.shape[0]].T for t in args["out"]
    ]
    problem, operands = checked(**args)
    assert problem.out_m_major
    for view, given in zip(operands.out, args["out"], strict=True):
        assert view.data_ptr() == given.data_ptr() and view.shape == given.shape
        assert view.stride() == (1, given.shape[0] + 8)


def test_out_rows_overlap():
    args = replaced("out", lambda t: t.as_strided((40, 72), (71, 1)))
    refused(args, ValueError, "group 1: out", "pitch of 71", "expected 72", "torch.empty(40, 72)")


def test_devices_differ():
    args = replaced("b_scale", lambda t: t.to("meta"))
    refused(args, ValueError, "group 1: b_scale", "meta", "cpu", "one device")


@pytest.mark.parametrize("name", ["a_scale", "out"])
def test_gradients(name):
    args = replaced(
        name, lambda t: (t.view(torch.float8_e4m3fn) if name == "a_scale" else t).requires_grad_()
    )
    refused(args, UnsupportedProblem, f"group 1: {name}", "requires_grad=True", ".detach()")
    with torch.no_grad():
        check_list_operands(**args)


def test_alpha_gradients():
    args = arguments() | {"alpha": torch.ones(2, requires_grad=True)}
    refused(args, UnsupportedProblem, "alpha", "requires_grad=True", ".detach()")


@pytest.mark.parametrize("alpha", [2.0, "ab", ["1", "2"], [torch.ones(1), torch.ones(1)]])
def test_alpha_kind(alpha):
    refused(arguments() | {"alpha": alpha}, TypeError, "alpha", "float32 tensor", "one per group")


def test_alpha_dtype():
    refused(arguments() | {"alpha": torch.ones(2).double()}, TypeError, "alpha", "float64", "alpha.float()")


@pytest.mark.parametrize("alpha", [torch.ones(3), torch.ones(2, 1), torch.ones(()), torch.ones(4)[::2]])
def test_alpha_shape(alpha):
    fix = "alpha.reshape(2).contiguous()"
    refused(arguments() | {"alpha": alpha}, ValueError, "alpha", list(alpha.shape), "[2]", fix)


def test_alpha_count():
    refused(
        arguments() | {"alpha": [1.0]}, ValueError, "alpha has 1 entries for 2 groups", "one number a group"
    )


def test_alpha_device():
    alpha = torch.ones(2, device="meta")
    refused(arguments() | {"alpha": alpha}, ValueError, "alpha is on meta", "cpu", "one device")


def test_rows_beyond_32_bits():
    rows = INT32_MAX + 1
    args = arguments() | {"a": [torch.empty(rows, 16, dtype=torch.uint8, device="meta")] * 2}
    for name in ("b", "a_scale", "b_scale", "out"):
        args[name] = [t.to("meta") for t in args[name]]
    refused(args, UnsupportedProblem, "group 0: a", f"M={rows}", str(INT32_MAX), "split")


def test_out_pitch_beyond_32_bits():
    wide = torch.empty(2 * (INT32_MAX + 1), dtype=torch.float16, device="meta").view(2, INT32_MAX + 1)
    args = arguments(((2, 72, 256),))
    for name in ("a", "b", "a_scale", "b_scale"):
        args[name] = [t.to("meta") for t in args[name]]
    args |= {"alpha": None, "out": [wide[:, :72]]}
    refused(args, ValueError, "group 0: out", INT32_MAX + 1, str(INT32_MAX), "torch.empty(2, 72)")


@pytest.mark.parametrize("name", ["a", "b", "a_scale", "b_scale"])
def test_out_overlaps_an_input(name):
    """The last byte of the input is the first of the output's storage."""
    args = arguments()
    given = args[name][0]
    store = torch.zeros(given.numel() + 40 * 72 * 2, dtype=torch.uint8)
    args[name][0] = store[: given.numel()].view(given.shape)
    args["out"][1] = store[given.numel() - 2 :][: 40 * 72 * 2].view(torch.float16).view(40, 72)
    refused(args, ValueError, "out[1]", f"{name}[0]", "overlaps", "an output of its own")


def test_out_overlaps_alpha():
    args, store = arguments(((16, 16, 64),)), torch.zeros(256, dtype=torch.float16)
    args |= {"out": [store.view(16, 16)], "alpha": store[254:].view(torch.float32)}
    refused(args, ValueError, "out[0]", "alpha", "overlaps", "an output of its own")


def test_outs_overlap():
    args, buffer = arguments(((40, 64, 128), (33, 64, 128))), poisoned(40, 128, dtype=torch.float16)
    args["out"] = [buffer[:, :64], buffer[:33, 63:127]]
    refused(args, ValueError, "out[0]", "out[1]", "overlaps", "an output of its own")


def test_outs_overlap_with_different_pitches():
    args, store = arguments(((4, 8, 64),) * 2), poisoned(100, dtype=torch.float16)
    # Rows at 0, 20, 40, 60 and rows at 8, 39, 70, 101 (8 long each) overlap only at 39 to 41.
    args["out"] = [store.as_strided((4, 8), (20, 1)), store.as_strided((3, 8), (31, 1), 8)]
    args["a"][1], args["a_scale"][1] = fp4(3, 64), blocked(3, 64)
    refused(args, ValueError, "out[0]", "out[1]", "overlaps")
    args["out"][1] = store.as_strided((3, 8), (20, 1), 10)
    check_list_operands(**args)
