"""Files without what their constants decide: small ones, line by line; and the exports, by their machine code."""

import ast
import json
import re
import subprocess
import sys
import textwrap

import pytest

from nvfp4_cute.competition import export
from nvfp4_cute.competition.bundle import Line
from nvfp4_cute.competition.fold import fold
from nvfp4_cute.problems import registry

MOST_LINES = 2000
EXPORTED = [name for name in registry.names() if registry.load(name).submission]


def folded(source, *entry_points):
    lines = [Line(text, "f.py", n) for n, text in enumerate(textwrap.dedent(source).strip().splitlines(), 1)]
    return fold(lines, entry_points or ("main",))


def check(source, expected, *entry_points):
    """`expected`: with as many blank lines as its author likes."""
    found = "\n".join(line.text for line in folded(source, *entry_points))
    assert found == re.sub(r"\n{3,}", "\n\n", textwrap.dedent(expected).strip())


def test_a_parameter_with_one_value_and_the_branch_that_it_decides():
    check(
        '''
        def add(x, y, twice, scale=1):
            """A sum.

            Args:
                x, y: numbers.
                twice: whether it
                    is doubled.
            """
            # How often
            if twice:
                return 2 * (x + y)
            # Once
            return (x + y) * scale


        def main(a):
            return add(a, 3, twice=False) + add(a, 4, False, 1)
        ''',
        '''
        def add(x, y):
            """A sum.

            Args:
                x, y: numbers.
            """
            # Once
            return x + y


        def main(a):
            return add(a, 3) + add(a, 4)
        ''',
    )


def test_operands_of_a_condition_that_has_a_name():
    check(
        """
        EARLY = False


        def main(x, y):
            waits = x.m > 1 and not EARLY
            kept = x and not EARLY
            y.n = waits
            return f(waits, kept)
        """,
        """
        EARLY = False


        def main(x, y):
            waits = x.m > 1
            kept = x and not EARLY
            y.n = waits
            return f(waits, kept)
        """,
    )


def test_elif_else_and_what_comes_behind_a_return():
    check(
        """
        KIND = "b"


        def main(x):
            if KIND == "a":
                x += 1
            elif x > 3:
                x += 2
            elif KIND == "b":
                x += 3
            else:
                x += 4
            if KIND == "b" and x > 0:
                # positive
                return x if KIND != "b" else -x
            return lost(x) if KIND == "a" else 0


        def lost(x):
            return x
        """,
        """
        def main(x):
            if x > 3:
                x += 2
            else:
                x += 3
            if x > 0:
                # positive
                return -x
            return 0
        """,
    )


def test_fields_attributes_and_definitions_that_nothing_needs():
    check(
        '''
        from dataclasses import dataclass
        from typing import Any, Optional


        @dataclass(frozen=True)
        class Args:
            """Arguments.

            Attributes:
                a: a number.
                extra: never there.
            """

            a: int
            extra: Optional[int] = None
            unread: int = 0


        class Kernel:
            """A kernel."""

            def __init__(self, form, wide):
                self.form = form
                self.wide = wide

            def run(self, x):
                args = Args(a=x, extra=None, unread=x)
                if args.extra is not None:
                    return helper(args.extra)
                return args.a if self.form == "list" else self.other(x)

            def other(self, x):
                return x - self.wide


        def helper(x):
            return x


        def main(x):
            return Kernel("list", True).run(x)
        ''',
        '''
        from dataclasses import dataclass


        @dataclass(frozen=True)
        class Args:
            """Arguments.

            Attributes:
                a: a number.
            """

            a: int


        class Kernel:
            """A kernel."""

            def __init__(self):
                pass

            def run(self, x):
                args = Args(a=x)
                return args.a


        def main(x):
            return Kernel().run(x)
        ''',
    )


def test_numbers_keep_their_distance():
    check(
        """
        def f(x, y, z):
            return x + y.bit_length() - z


        def main(x):
            return f(x, 1, -2) + f(x, 1, -2)
        """,
        """
        def f(x):
            return x + (1).bit_length() - (-2)


        def main(x):
            return f(x) + f(x)
        """,
    )


PLANNED = '''
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute

VERSION = getattr(cutlass, "__version__", "4.3")


@dataclass(frozen=True)
class KernelConfig:
    n: int
    num_cta: int | None = None
    pair: bool = True

    def to_name(self):
        return f"n{self.n}"


@dataclass(frozen=True)
class Plan:
    """Bytes.

    Attributes:
        rows, width: of a tile.
    """

    rows: int
    width: int
    dtype: type = cutlass.Uint8


def make_plan(config: KernelConfig, words: int) -> Plan:
    """The plan of a config."""
    width = 4 * words
    return Plan(config.n * 2, width)


def columns(config: KernelConfig) -> int:
    return 2 if config.pair else 1


CONFIGS = {3: KernelConfig(64, 148), 4: KernelConfig(128)}


@cute.jit
def main(size):
    config = CONFIGS.get(size, KernelConfig(64))
    plan = make_plan(config, 2)
    row = [0] * 4
    row[1] = plan.rows
    row[2] = row[1]
    for i in range(columns(config) - 1):
        row.append(plan.width + i)
    if cutlass.const_expr(columns(config) > 2 and size):
        row.append(1)
    if cutlass.const_expr(columns(config) > 1 and size):
        row.append(2)
    return row, plan.dtype, columns(config), config.num_cta, VERSION >= (4, 8)
'''


def test_what_plans_come_to_for_the_frozen_configs():
    """A constant where all configs agree, a table where they differ; lists, launches and versions stay what they are."""
    check(
        PLANNED.replace("CONFIGS.get(size, KernelConfig(64))", "CONFIGS.get(size, DEFAULT)").replace(
            "\n\n@cute.jit", "DEFAULT = KernelConfig(64)\n\n\n@cute.jit"
        ),
        '''
        from dataclasses import dataclass

        import cutlass
        import cutlass.cute as cute

        VERSION = getattr(cutlass, "__version__", "4.3")

        @dataclass(frozen=True)
        class KernelConfig:
            n: int
            num_cta: int | None = None

            def to_name(self):
                return f"n{self.n}"

        @dataclass(frozen=True)
        class Plan:
            """Bytes.

            Attributes:
                rows, width: of a tile.
            """

            rows: int

        def make_plan(config: KernelConfig) -> Plan:
            """The plan of a config."""
            return {"n64": Plan(rows=128), "n128": Plan(rows=256)}[config.to_name()]

        CONFIGS = {3: KernelConfig(64, 148), 4: KernelConfig(128)}
        DEFAULT = KernelConfig(64)

        @cute.jit
        def main(size):
            config = CONFIGS.get(size, DEFAULT)
            plan = make_plan(config)
            row = [0] * 4
            row[1] = plan.rows
            row[2] = row[1]
            row.append(8)
            if cutlass.const_expr(size):
                row.append(2)
            return row, cutlass.Uint8, 2, config.num_cta, VERSION >= (4, 8)
        ''',
    )


def test_functions_of_one_expression_and_what_fits_a_line():
    check(
        """
        class Table:
            def __init__(self, places):
                self.places = places

            @property
            def first(self):
                return self.places

            def at(self, i):
                return self.places[i] + 1


        def twice(
            x,  # a number
        ):
            return x * 2


        def one(x):
            return x

        def many(x):
            return pass_on(x) - pass_on(x + 1)


        def pass_on(x):
            return lost(x, 3)


        def lost(x, y):
            z = x
            while z:
                z -= y
            return z


        def main(
            x,
            table: Table,
        ):
            x = many(
                one(x),
            ) + twice(x)
            return Table(
                [
                    x,
                    table.first,
                ],
            ).at(x), (x,)
        """,
        """
        class Table:
            def __init__(self, places):
                self.places = places

            def at(self, i):
                return self.places[i] + 1

        def lost(x):
            z = x
            while z:
                z -= 3
            return z

        def main(x, table: Table):
            x = (lost(x) - lost(x + 1)) + (x * 2)
            return Table([x, table.places]).at(x), (x,)
        """,
    )


def test_arguments_behind_a_star():
    check(
        """
        def area(a, b, unit):
            return lost(a, b) if unit else a


        def lost(a, b):
            while a:
                a -= b
            return a


        def main(x):
            sizes = x.m, x.n, True
            return area(*sizes) + area(*sizes)
        """,
        """
        def lost(a, b):
            while a:
                a -= b
            return a

        def main(x):
            return lost(x.m, x.n) + lost(x.m, x.n)
        """,
    )


UNTOUCHED = {
    "a star of what changes": "def f(x, y):\n    return x if y else 0\n\n\ndef main(x):\n    y = x.m, True\n    x.m = 3\n    return f(*y)",
    "two values": "def f(x, y):\n    return x if y else 0\n\n\ndef main(x):\n    return f(x, True) + f(x, False)",
    "used as a value": "def f(x, y):\n    return x if y else 0\n\n\ndef main(x):\n    return map(f, x, f(x, True))",
    "spread": "def f(x, y):\n    return x if y else 0\n\n\ndef main(x):\n    return f(*x, y=True)",
    "bound anew": "def f(x, y):\n    for _ in x:\n        y = not y\n    return x if y else 0\n\n\ndef main(x):\n    return f(x, True)",
    "entry": "def main(x, y=True):\n    return x if y else main(x, True)",
    "True is not 1": "def f(x, y):\n    return x + y\n\n\ndef main(x):\n    return f(x, True) + f(x, 1)",
    "a local of two values": "def main(x):\n    y = None\n    if x:\n        y = 3\n    return y is None",
}


@pytest.mark.parametrize("case", UNTOUCHED)
def test_what_is_not_known_stays(case):
    check(UNTOUCHED[case], UNTOUCHED[case])


def test_every_line_keeps_its_place_and_says_why_it_changed():
    lines = folded("def f(x, y):\n    if y:\n        return x\n\n\ndef main(x):\n    return f(x, True)")
    assert [(line.number, line.text) for line in lines] == [(6, "def main(x):"), (7, "    return x")]
    assert lines[1].reasons == ("a constant of this file", "the only use of what it says")


@pytest.fixture(scope="module")
def group_gemm():
    return export.make_submission("nvfp4_group_gemm"), export.make_submission("nvfp4_group_gemm", folded=True)


@pytest.mark.slow
def test_the_group_problem_has_two_thousand_lines_and_every_one_is_traced(group_gemm):
    whole, short = group_gemm
    assert len(short.lines) <= MOST_LINES < 0.5 * len(whole.lines)
    ast.parse(short.text)
    places = {(line.source, line.number) for line in whole.lines if line.source}
    texts = {(line.source, line.number): line.text for line in whole.lines if line.source}
    for line in short.lines:
        assert line.source or line.reasons
        if line.source:
            place = line.source, line.number
            assert place in places and (line.reasons or line.text == texts[place]), line
    for word in ("split_k > 1", "class DeviceGroups", "gelu_tanh"):
        assert word in whole.text and word not in short.text


@pytest.mark.parametrize(
    "name", ["nvfp4_gemv", *(pytest.param(n, marks=pytest.mark.slow) for n in EXPORTED if n != "nvfp4_gemv")]
)
def test_it_computes_the_smallest_shape_strictly(verdict, name):
    case = min(registry.load(name).tests, key=lambda case: case.work.flops)
    results = verdict(export.make_submission(name, folded=True).text, strict=True, problem=name, cases=[case])
    assert results.passed, results


# Compiles what a file's frozen configs need and prints a hash of the PTX of each, but the kernel's name, which tells the fields of its
# arguments.
PROGRAM = """
import hashlib, importlib, inspect, json, re, sys
from contextlib import ExitStack
from dataclasses import replace
from nvfp4_cute.competition.worker import emulated_process
found = []
with ExitStack() as stack:
    emulated_process("sm_100a", stack)
    import cutlass.cute as cute
    plain = cute.compile
    def compiled(*args):
        code = plain[cute.KeepPTX(True)](*args)
        text = code.__ptx__ if isinstance(code.__ptx__, bytes) else code.__ptx__.encode()
        (name,) = re.findall(rb"[.]entry (\\w+)", text)
        found.append(hashlib.sha256(text.replace(name, b"kernel")).hexdigest())
        return code
    cute.compile = compiled
    sys.path.insert(0, ".")
    submission = importlib.import_module("submission")
    def asked(function, **values):
        return {k: v for k, v in values.items() if k in inspect.signature(function).parameters}
    configs = getattr(submission, "CONFIGS", None)
    activation = getattr(submission, "ACTIVATION", sys.argv[1] or None)
    if configs is None:
        submission._compiled()
    frozen = list((configs or {}).items())
    if frozen:
        default = getattr(submission, "SUBMISSION_DEFAULT_CONFIG", None) or submission.DEFAULT_CONFIG
        frozen.append((frozen[0][0], default))
    for sizes, config in frozen:
        options = asked(submission._compiled, num_groups=len(sizes), activation=activation)
        submission._compiled(replace(config, num_cta=None), **options)
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_the_machine_code_is_the_same(name, tmp_path):
    hashes = []
    for short in (False, True):
        folder = tmp_path / str(short)
        folder.mkdir()
        (folder / "submission.py").write_text(export.make_submission(name, folded=short).text)
        activation = "silu" if name == "nvfp4_dual_gemm" else ""
        command = [sys.executable, "-c", PROGRAM, activation]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        hashes.append(json.loads(done.stdout.splitlines()[-1]))
    assert hashes[0] == hashes[1] and hashes[0]
