"""PTX of one-instruction kernels for the matrix tests."""


def _registers(prefix: str, count: int) -> str:
    return ", ".join(f"%{prefix}{i}" for i in range(count))


def _loads(prefix: str, count: int, base: str, pitch: int) -> list[str]:
    return [f"ld.global.b32 %{prefix}{i}, [{base}+{pitch * i}];" for i in range(count)]


def _module(target: str, params: list[str], registers: str, body: list[str], shared: str = "") -> str:
    text = "\n".join(body)
    return f""".version 8.7
.target {target}
.address_size 64
{shared}
.visible .entry k({", ".join(params)})
{{
.reg .pred %p<4>;
.reg .b16 %h<8>;
.reg .b32 %r<16>;
.reg .b64 %rd<16>;
{registers}
{text}
ret;
}}
"""


def _thread_pointers(names: list[str]) -> list[str]:
    """%rd1, %rd2, ...: parameter + 4 * thread."""
    lines = ["mov.u32 %r0, %tid.x;", "mul.wide.u32 %rd0, %r0, 4;"]
    for i, name in enumerate(names, 1):
        lines += [f"ld.param.u64 %rd{i}, [{name}];", f"add.u64 %rd{i}, %rd{i}, %rd0;"]
    return lines


def register_kernel(
    template: str, counts: dict[str, int], result: str = "d", *, target: str = "sm_120a", extra: str = ""
) -> str:
    """One warp loads fragments, executes the instruction, stores one fragment.

    template: the instruction with {a}, {b}, ... for register lists. counts: fragment -> registers; each is a kernel
    parameter, an array uint32 (registers, 32). extra: further declarations and instructions before it.
    """
    names = list(counts)
    body = _thread_pointers(names)
    for i, name in enumerate(names, 1):
        if name != result:
            body += _loads(name, counts[name], f"%rd{i}", 128)
    body += [extra, template.format(**{n: "{" + _registers(n, c) + "}" for n, c in counts.items()})]
    where = f"%rd{names.index(result) + 1}"
    body += [f"st.global.b32 [{where}+{128 * i}], %{result}{i};" for i in range(counts[result])]
    registers = "\n".join(f".reg .b32 %{n}<{c}>;" for n, c in counts.items())
    return _module(target, [f".param .u64 {n}" for n in names], registers, body)


def wgmma_kernel(
    opcode: str, literals: str, accumulators: int, smem_bytes: int, *, a_registers: bool, steps: int = 1,
    step_bytes: int = 32,
) -> str:  # fmt: skip
    """Warpgroups copy an image to shared memory, execute `steps` wgmma on it, and store D.

    Parameters: image, a (uint32 (4, threads) or unused), a descriptor, b descriptor (both relative to shared memory;
    each step adds step_bytes to the start addresses), d (uint32 (accumulators, threads), read and written), scale-d
    of the first step.
    """
    body = [
        *_thread_pointers(["image", "a", "d"]),
        "mov.u32 %r1, smem;", "mov.u32 %r2, %ntid.x;", "shl.b32 %r2, %r2, 2;", "cvt.u64.u32 %rd8, %r2;",
        "shl.b32 %r3, %r0, 2;",
        "COPY:",
        f"setp.ge.u32 %p1, %r3, {smem_bytes};",
        "@%p1 bra DONE;",
        "ld.global.b32 %r4, [%rd1];", "add.u32 %r5, %r1, %r3;", "st.shared.b32 [%r5], %r4;",
        "add.u64 %rd1, %rd1, %rd8;", "add.u32 %r3, %r3, %r2;",
        "bra COPY;",
        "DONE:",
        "fence.proxy.async;", "bar.sync 0;",
        "shr.u32 %r6, %r1, 4;", "and.b32 %r6, %r6, 0x3FFF;", "cvt.u64.u32 %rd9, %r6;",
        "ld.param.u64 %rd4, [desc_a];", "add.u64 %rd4, %rd4, %rd9;",
        "ld.param.u64 %rd5, [desc_b];", "add.u64 %rd5, %rd5, %rd9;",
        "ld.param.u32 %r7, [scale_d];", "setp.ne.u32 %p2, %r7, 0;",
    ]  # fmt: skip
    if a_registers:
        body += _strided("ld.global.b32 %a{i}, [%rd10];", 4, "%rd2")
    body += _strided("ld.global.b32 %d{i}, [%rd10];", accumulators, "%rd3")
    a = "{" + _registers("a", 4) + "}" if a_registers else "%rd4"
    body.append("wgmma.fence.sync.aligned;")
    for step in range(steps):
        scale = "%p2" if step == 0 else "1"
        body.append(f"{opcode} {{{_registers('d', accumulators)}}}, {a}, %rd5, {scale}{literals};")
        body += [f"add.u64 %rd4, %rd4, {step_bytes // 16};", f"add.u64 %rd5, %rd5, {step_bytes // 16};"]
    body += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    body += _strided("st.global.b32 [%rd10], %d{i};", accumulators, "%rd3")
    params = ["u64 image", "u64 a", "u64 desc_a", "u64 desc_b", "u64 d", "u32 scale_d"]
    registers = f".reg .b32 %a<4>;\n.reg .b32 %d<{accumulators}>;"
    shared = ".extern .shared .align 1024 .b8 smem[];"
    return _module("sm_90a", [f".param .{p}" for p in params], registers, body, shared)


def _strided(line: str, count: int, base: str) -> list[str]:
    """The line for i = 0, 1, ..., with %rd10 = base + i * (4 * threads)."""
    lines = [f"mov.u64 %rd10, {base};"]
    for i in range(count):
        lines += [line.format(i=i), "add.u64 %rd10, %rd10, %rd8;"]
    return lines
