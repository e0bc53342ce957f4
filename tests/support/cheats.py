"""Submissions that do not compute what they should, and one that does. Each is the text of a file.

They use torch's matrix product, which the emulator computes, so that no kernel has to be compiled.

They use torch's product, which the emulator answers, so that no kernel has to be compiled.
"""

HONEST = """
import torch

def flat(scale):
    return scale.permute(5, 2, 4, 0, 1, 3).reshape(-1)

def compute(data):
    abc, _, scales, _ = data
    for (a, b, c), (sfa, sfb) in zip(abc, scales):
        product = torch._scaled_mm(a[:, :, 0], b[:, :, 0].t(), flat(sfa), flat(sfb), out_dtype=torch.float16)
        c[:, :, 0] = product
    return [c for _, _, c in abc]

def custom_kernel(data):
    return compute(data)
"""


def variant(text: str) -> str:
    return HONEST + text


# Name -> (text of the submission, message of the strict mode).
CHEATS = {
    "remembers outputs by shape": (
        variant("""
cache = {}
def custom_kernel(data):
    key = tuple(data[3])
    if key not in cache:
        cache[key] = [c.clone() for c in compute(data)]
    return [c.clone() for c in cache[key]]
"""),
        "mismatch",
    ),
    "relies on C still holding the answer": (
        variant("""
calls = 0
def custom_kernel(data):
    global calls
    calls += 1
    return compute(data) if calls == 1 else [c for _, _, c in data[0]]
"""),
        "mismatch",
    ),
    "remembers outputs by address": (
        variant("""
cache = {}
def custom_kernel(data):
    key = tuple(t.data_ptr() for group in data[0] for t in group[:2])
    if key not in cache:
        cache[key] = [c.clone() for c in compute(data)]
    for (_, _, c), known in zip(data[0], cache[key]):
        c.copy_(known)
    return [c for _, _, c in data[0]]
"""),
        "mismatch",
    ),
    "remembers outputs by identity of the inputs": (
        variant("""
cache = {}
def custom_kernel(data):
    if id(data) not in cache:
        cache[id(data)] = data, [c.clone() for c in compute(data)]
    return [c.clone() for c in cache[id(data)][1]]
"""),
        "mismatch",
    ),
    "answers with what the call before computed": (
        variant("""
last = None
def custom_kernel(data):
    global last
    now = [c.clone() for c in compute(data)]
    answer, last = last or now, now
    return answer
"""),
        "mismatch",
    ),
    "works on a queue of its own": (
        variant("""
def custom_kernel(data):
    side = getattr(torch.cuda, "Str" + "eam")()
    with getattr(torch.cuda, "str" + "eam")(side):
        return compute(data)
"""),
        "made a queue of its own (torch.cuda.Stream)",
    ),
    "replaces the checker": (
        variant("""
def custom_kernel(data):
    from nvfp4_cute.problems import matching, registry
    from nvfp4_cute.problems.nvfp4_group_gemm import reference
    matching.match_list = reference.match_list = reference.check = lambda *args, **options: (True, "")
    return [torch.zeros_like(c) for _, _, c in data[0]]
"""),
        "mismatch",
    ),
    "replaces the reference": (
        variant("""
def custom_kernel(data):
    torch._scaled_mm = lambda a, b, *args, **options: torch.zeros(a.shape[0], b.shape[1])
    return [torch.zeros_like(c) for _, _, c in data[0]]
"""),
        "mismatch",
    ),
    "sets the clock": (
        variant("""
torch.cuda.Event.elapsed_time = lambda self, end: 0.001
def custom_kernel(data):
    return compute(data)
"""),
        "replaced Event.elapsed_time",
    ),
    "sets the host's clock while it runs": (
        variant("""
def custom_kernel(data):
    import time
    time.perf_counter = lambda: 0.0
    return compute(data)
"""),
        "replaced time.perf_counter",
    ),
    "does not wait for its work": (
        variant("""
torch.cuda.synchronize = lambda device=None: None
def custom_kernel(data):
    return compute(data)
"""),
        "replaced torch.cuda.synchronize",
    ),
    "answers when it is looked at": (
        variant("""
class Later(torch.Tensor):
    pass
def custom_kernel(data):
    return [c.as_subclass(Later) for c in compute(data)]
"""),
        "output is a Later",
    ),
    "gives one buffer for every answer": (
        variant("""
buffers = {}
def custom_kernel(data):
    answer = compute(data)
    kept = buffers.setdefault(tuple(data[3]), [c.clone() for c in answer])
    for place, c in zip(kept, answer):
        place.copy_(c)
    return kept
"""),
        "changed after its call",
    ),
    "changes its inputs": (
        variant("""
def custom_kernel(data):
    answer = [c.clone() for c in compute(data)]
    data[0][0][0].view(torch.uint8).zero_()
    return answer
"""),
        "changed its inputs",
    ),
    "is right only some of the time": (
        variant("""
calls = 0
def custom_kernel(data):
    global calls
    calls += 1
    answer = compute(data)
    if calls == 5:
        answer[0][3, 5, 0] += 64
    return answer
"""),
        "mismatch",
    ),
}
# Cheats that the official harness does not notice with one call and one check.
UNNOTICED_BY_ONE_CALL = [
    "remembers outputs by shape",
    "relies on C still holding the answer",
    "remembers outputs by address",
    "remembers outputs by identity of the inputs",
    "answers with what the call before computed",
    "works on a queue of its own",
    "gives one buffer for every answer",
    "changes its inputs",
    "is right only some of the time",
]
