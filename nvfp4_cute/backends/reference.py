"""The float64 reference as a backend: right everywhere, fast nowhere."""

from nvfp4_cute.launch.task import Task


def run(task: Task) -> None:
    """Have the task compute itself."""
    task.reference()
