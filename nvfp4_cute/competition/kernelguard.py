"""KernelGuard, the filter that GPU MODE's service runs before it times a submission, if it is installed here.

`pip install kernelguard` (https://github.com/gpu-mode/kernelguard). It reads a submission from its input and prints as
JSON whether the service would filter it. It executes nothing.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass

TOOL = "kernelguard"
TIMEOUT_S = 120


@dataclass(frozen=True)
class Opinion:
    """KernelGuard's opinion of a file.

    Attributes:
        classification: "valid" or worse.
        filtered: whether the service refuses to time the file.
        patterns: recognized patterns, one line each.
    """

    classification: str
    filtered: bool
    patterns: tuple[str, ...]

    def __str__(self) -> str:
        """Returns one line, and one more per pattern."""
        verdict = "the service filters this file" if self.filtered else "not filtered"
        lines = [f"KernelGuard: {self.classification}, {verdict}", *(f"  {line}" for line in self.patterns)]
        return "\n".join(lines)


def ask(text: str) -> Opinion | None:
    """Returns KernelGuard's opinion of a submission; None if it is not installed.

    Raises:
        ValueError: it failed.
    """
    if shutil.which(TOOL) is None:
        return None
    try:
        done = subprocess.run(
            [TOOL, "--api-mode"], input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        answer = json.loads(done.stdout)
        patterns = tuple(
            f"{found['pattern']} ({found['severity']}): {found['evidence']}"
            for found in answer["matched_patterns"]
        )
        return Opinion(answer["classification"], bool(answer["should_filter"]), patterns)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{TOOL} took more than {TIMEOUT_S} s") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{TOOL} gave no answer ({error!r}): {done.stderr.strip()[-500:]}") from None
