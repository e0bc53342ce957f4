"""Changes CuTe DSL's host code so that launches read tensor maps where they were encoded.

The DSL encodes a tensor map in memory, loads it as a value of sixteen words, and stores that in another place, whose
address the launch gets. The maps of many groups are too many values for LLVM: the object file of the host code that
launches 32 groups on sm_90a, which has two kernels, took 16 s. The launch can use the address of the first place, which
nobody writes after the map is encoded.
"""

from typing import Any

TENSOR_MAP = "!llvm.struct<(struct<(array<16 x i64>)>)>"
# From the stored value to the place where it was encoded: operations, and the operand to follow.
WAY_BACK = (("llvm.insertvalue", 1), ("llvm.load", 0), ("llvm.inttoptr", 0), ("llvm.ptrtoint", 0))


def pass_maps_in_place(module: Any) -> int:
    """Makes the launches of a compiled module (``JitCompiledFunction.ir_module``) read tensor maps where they were encoded.

    Returns:
        Number of maps; 0, without any change, if the DSL passes them in another way.
    """
    with module.context:
        stores = _stores_of_maps(module)
        return sum(map(_pass_in_place, stores))


def _stores_of_maps(module: Any) -> list:
    from cutlass._mlir import ir

    found = []

    def visit(operation: Any) -> Any:
        if operation.name == "llvm.store" and str(operation.operands[0].type) == TENSOR_MAP:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _pass_in_place(store: Any) -> bool:
    value, copy = store.operands
    way, place = [], value
    for name, operand in WAY_BACK:
        if not _is_result_of(name, place):
            return False
        way.append(place.owner)
        place = place.owner.operands[operand]
    if not (_is_result_of("llvm.alloca", place) and _is_result_of("llvm.alloca", copy)):
        return False
    copied = copy.owner
    copy.replace_all_uses_with(place)
    for operation in (store, *way, copied):
        if not any(list(result.uses) for result in operation.results):
            operation.erase()
    return True


def _is_result_of(name: str, value: Any) -> bool:
    # The owner of a block's argument is a block.
    return getattr(value.owner, "operation", None) is not None and value.owner.operation.name == name
