"""The launch table: one int64 array in host memory that passes a launch from Python to a kernel's compiled host code.

Only one pointer crosses the language boundary, for any number of groups. The compiled host code reads sizes and addresses from
the table, encodes the tensor maps, and launches. The table may be freed after it returns.

Row 0 is the header. In list form, row 1 + slot describes the group at that slot of the schedule. In other forms, row 1
describes the operands of all groups.
"""

import struct
from enum import IntEnum

# Rows by which one operand interleaves the weights of a dual GEMM's products.
INTERLEAVE = {"interleaved_64_up_first": 64, "interleaved_32_gate_first": 32}


def float32_bits(value: float) -> int:
    """Returns the bits of ``value``, rounded to float32, as a signed integer."""
    return struct.unpack("=i", struct.pack("=f", value))[0]


class Header(IntEnum):
    """Columns of row 0."""

    NUM_TILES = 0  # work tiles of all groups; unused if the device counts them
    NUM_CTA = 1  # persistent CTAs to launch
    ALPHA = 2  # address of the fp32 factors; unused if the kernel has none
    GROUP_SIZES = 3  # address of the int32 offs or masked_m, or of the ids of routed groups; unused in list and batched form
    NUM_GROUPS = 4  # groups described by row 1; unused in list form
    ALPHA2 = 5  # address of the factors of a dual GEMM's second product
    OUT_GLOBAL_SCALE = 6  # address of the fp32 global scales of NVFP4 outputs; 0 for none
    LIMIT = (
        7  # bits of the fp32 number that a dual GEMM's products are cut to; unused where the kernel has none
    )
    CHAIN = 8  # address of the int32 counters of a chain
    WORKSPACE = 9  # address of the workspace between launches; unused if there is one launch
    BIAS = 10  # address of one number per column; unused if the kernel has none
    COUNTERS = 11  # address of counters that are 0 before and after a launch; unused if the kernel has none
    CHOICES = 12  # consecutive routed groups that share a row of ``a``
    FIRST_EXPERT = 13  # id of the first weights of routed groups
    ID_WORDS = 14  # 32-bit words of an id of routed groups


class Group(IntEnum):
    """Columns of a group's row: addresses, pitches in elements, extents in elements, and its place.

    A batch is a group's part of an operand for all groups. There is one batch in list form, and for ragged ``a``.
    """

    A = 0
    B = 1
    SFA = 2
    SFB = 3
    OUT = 4
    A_PITCH = 5  # between rows
    B_PITCH = 6
    OUT_PITCH = 7  # between rows, or between columns of an M-major output; for NVFP4 in bytes
    A_BATCH_PITCH = 8
    B_BATCH_PITCH = 9
    OUT_BATCH_PITCH = 10
    B2 = 11  # the second b of a dual GEMM, with the extents of the first
    SFB2 = 12
    B2_PITCH = 13
    B2_BATCH_PITCH = 14
    M = 15  # extents are at least 1, so that unused tensor maps are well formed
    N = 16
    K = 17
    A_BATCH = 18  # batches
    B_BATCH = 19
    SFA_ROW_BLOCKS = 20  # 128-row blocks of scales per batch
    SFB_ROW_BLOCKS = 21
    TILE_OFFSET = 22  # tiles of all earlier slots
    GROUP_IDX = 23  # index of the group in the caller's lists and among the alphas
    OUT_SCALE = 24  # first scale block of an NVFP4 output
    SFB_BATCH_BLOCKS = 25  # 128-row blocks of scales between batches of every b
    ROW_SCALE = 26  # fp32, one factor per row of a; unused if the kernel has none


NUM_COLUMNS = len(Group)


class Gemv(IntEnum):
    """Entries of a gemv's table, one row: addresses, strides in bytes (of out: in elements), extents in elements."""

    A = 0
    B = 1
    SFA = 2
    SFB = 3
    OUT = 4
    ALPHA = 5  # address of the fp32 factors; unused if the kernel has none
    A_PITCH = 6
    A_BATCH = 7
    B_BATCH = 8
    SFA_BATCH = 9
    SFB_BATCH = 10
    OUT_PITCH = 11
    OUT_BATCH = 12
    ALPHA_BATCH = 13  # 0 if one factor serves every batch
    M = 14
    K = 15
    L = 16
    NUM_SMS = 17  # number of SMs of the GPU; unused if CTAs are not persistent


class GemvBias(IntEnum):
    """Entries after those of a gemv whose rows have a bias each.

    Separate, because exports have exactly the entries of a table.
    """

    BIAS = len(Gemv)  # address


class Quantize(IntEnum):
    """Entries of a quantization's table, one row: addresses, strides in bytes, extents in elements."""

    X = 0
    DATA = 1
    SCALE = 2
    GLOBAL_SCALE = (
        3  # address of one fp32 factor, or of one per group; if the launch computes one, address of its place
    )
    OFFS = 4  # address of the groups' ends, int32; unused if there is one group
    X_PITCH = 5
    X_BATCH = 6
    M = 7
    K = 8
    BATCHES = 9
    GROUPS = 10
    ATOM_ROWS = 11  # rows of scale atoms to write
    UP = 12  # second input; unused if there is one
    UP_PITCH = 13
    UP_BATCH = 14
    TIMES_0 = 15  # used if a global scale is found; see ``GlobalScale``
    TIMES_1 = 16
    PRODUCT_0 = 17
    PRODUCT_1 = 18


class Dequantize(IntEnum):
    """Entries of a dequantization's table, one row: addresses, strides in bytes, extents in elements."""

    DATA = 0
    SCALE = 1
    GLOBAL_SCALE = 2  # address of fp32 factors; unused if the kernel has none
    OUT = 3
    PITCH = 4
    BATCH = 5
    SCALE_BATCH = 6
    ROWS = 7
    K = 8
    BATCHES = 9
    GLOBAL_SCALE_BATCH = 10  # 0 if all batches have one factor


class GlobalScale(IntEnum):
    """Entries of the table of a kernel that finds a global scale, one row: addresses, a stride in bytes, extents."""

    X = 0
    OUT = 1  # fp32
    PARTIALS = 2  # one word per CTA; unused if there is one
    TIMES_0 = 3  # addresses of fp32 factors and of their products with the scale; unused if there are fewer
    TIMES_1 = 4
    PRODUCT_0 = 5
    PRODUCT_1 = 6
    PITCH = 7
    ROWS = 8
    ROW_UNITS = 9  # units of 16 bytes per row
    CTAS = 10


class FewRows(IntEnum):
    """Entries of a few-rows product's table, one row: addresses, strides in bytes (of out: in elements), extents."""

    A = 0
    B = 1
    SFA = 2
    SFB = 3
    OUT = 4
    ALPHA = 5  # address of the fp32 factors; unused if the kernel has none
    A_PITCH = 6
    B_PITCH = 7
    A_BATCH = 8
    B_BATCH = 9
    SFA_BATCH = 10
    SFB_BATCH = 11
    OUT_ROW = 12  # between rows of a
    OUT_COLUMN = 13  # between rows of b
    OUT_BATCH = 14
    ALPHA_BATCH = 15  # 0 if one factor serves every batch
    M = 16
    N = 17
    K = 18
    L = 19
    BIAS = 20  # address of one number per row of b; unused if the kernel has none


class W4A16(IntEnum):
    """Entries of a weight-only product's table, one row: addresses, strides in bytes (of out: in elements), extents."""

    X = 0  # 16-bit activations
    B = 1  # weights
    SFB = 2
    OUT = 3
    ALPHA = 4  # address of the fp32 factors; unused if the kernel has none
    X_PITCH = 5
    B_PITCH = 6
    X_BATCH = 7
    B_BATCH = 8
    SFB_BATCH = 9
    OUT_ROW = 10  # between rows of the activations
    OUT_COLUMN = 11  # between rows of the weights
    OUT_BATCH = 12
    ALPHA_BATCH = 13  # 0 if one factor serves every batch
    M = 14
    N = 15
    K = 16
    L = 17
    BIAS = 18  # address of one number per row of the weights; unused if the kernel has none


class Route(IntEnum):
    """Entries of a routing's table, one row: addresses, a stride in bytes, extents, and a number's bits."""

    LOGITS = 0
    BIAS = 1  # fp32, added to the logits; unused if the kernel has none
    CORRECTION = 2  # fp32, added to the scores only for the choice; unused if the kernel has none
    IDS = 3
    WEIGHTS = 4
    PITCH = 5  # between rows of the logits
    TOKENS = 6
    EXPERTS = 7
    TOP_K = 8
    NUM_GROUPS = 9  # groups of experts; unused if the kernel has none
    TOPK_GROUPS = 10
    SCALE = 11  # float32_bits of the factor of all weights
    GIVEN = 12  # int32 ids of the experts; unused if the kernel chooses them


class Permute(IntEnum):
    """Entries of a permutation's table, one row: addresses and extents."""

    IDS = 0
    OFFS = 1
    SLOTS = 2
    ROWS = 3
    PLACES = 4
    COUNTS = 5  # int32 [CTAS, EXPERTS], exchanged between CTAs; unused if there is one
    ID_BYTES = 6  # bytes per id: 4 or 8
    NUM_SLOTS = 7
    FIRST_EXPERT = 8
    EXPERTS = 9
    CTAS = 10
    SLOTS_PER_CTA = 11
    HEADER = 12  # PeerHeader; used from here on if the kernel waits for other ranks' ids
    HOST_FAULT = 13
    RANK = 14
    NUM_RANKS = 15
    TIMEOUT_NS = 16


class GatherQuantize(IntEnum):
    """Entries of a gather's table, one row: addresses, a stride in bytes, extents."""

    X = 0
    IDS = 1  # read if every expert has a global scale, or if the kernel finds the order
    ROWS = 2
    PLACES = 3
    GLOBAL_SCALE = 4  # address of one fp32 factor, or of one per expert; unused if the kernel has none
    DATA = 5
    SCALE = 6
    OFFS = 7  # written if the kernel finds the order; so are ROWS and SLOTS
    SLOTS = 8
    X_PITCH = 9
    ID_BYTES = 10
    TOKENS = 11
    TOP_K = 12
    K = 13
    FIRST_EXPERT = 14
    EXPERTS = 15


class Activate(IntEnum):
    """Entries of an activation's table, one row: addresses, a stride in bytes, extents, and a number's bits."""

    H = 0
    BIAS = 1  # in H's dtype, one row per expert; unused if the kernel has none
    IDS = 2
    SLOTS = 3
    PLACES = 4
    OFFS = 5
    GLOBAL_SCALE = 6  # fp32, one per expert; unused if the kernel has none
    DATA = 7
    SCALE = 8
    H_PITCH = 9
    ID_BYTES = 10
    ROWS = 11  # upper bound
    N = 12  # columns of the result
    FIRST_EXPERT = 13
    EXPERTS = 14
    LIMIT = 15  # float32_bits; unused if the kernel has none


class Finalize(IntEnum):
    """Entries of a weighted sum's table, one row: addresses, strides in bytes, extents."""

    H = 0
    ROWS = 1
    WEIGHTS = 2
    SHARED = 3  # unused if the kernel has none
    BIAS = 4  # in H's dtype, one row per expert; unused if the kernel has none
    IDS = 5  # read if there is a bias, or if rows are routed
    Y = 6
    H_PITCH = 7
    SHARED_PITCH = 8
    Y_PITCH = 9
    ID_BYTES = 10
    TOKENS = 11
    TOP_K = 12
    N = 13
    FIRST_EXPERT = 14
    HEADER = 15  # PeerHeader; used from here on if the kernel waits for other ranks' rows
    HOST_FAULT = 16
    RANK = 17
    NUM_RANKS = 18
    TIMEOUT_NS = 19
    EXPERTS = 20  # local experts; used if rows are routed


class Probe(IntEnum):
    """Entries of a probe's table, one row."""

    OUT = 0  # address of the output
    DATA = 1  # address of data that it reads, or reads and writes
    ARG0 = 2  # two numbers with a meaning of the probe's own
    ARG1 = 3
    CTAS = 4  # CTAs in the grid


class RankChoices(IntEnum):
    """Entries of the table of choices over ranks, one row: addresses, extents."""

    IDS = 0
    TO_RANK = 1
    TO_LOCAL = 2
    RANKS = 3
    LOCALS = 4
    GOALS = 5
    ID_BYTES = 6
    TOKENS = 7
    TOP_K = 8
    EXPERTS = 9
    PERIOD = 10  # columns of TO_RANK
    NUM_RANKS = 11


class PackRows(IntEnum):
    """Entries of the table of rows to send, one row: addresses, a stride in bytes, extents, offsets in bytes."""

    X = 0
    GLOBAL_SCALE = 1  # one fp32 factor; unused if the kernel has none
    RANKS = 2
    LOCALS = 3
    PAIRS = 4
    OFFS = 5  # read if there is a capacity
    SENT = 6
    RESULTS = 7  # written if there is a capacity
    X_PITCH = 8
    TOKENS = 9
    TOP_K = 10
    K = 11
    NUM_RANKS = 12
    CAPACITY = 13  # 0 for none
    VALUES = 14
    SCALES = 15
    ROW_BYTES = 16


class UnpackRows(IntEnum):
    """Entries of the table of received rows, one row: addresses, extents, offsets in bytes."""

    CAME = 0
    ROWS = 1
    PLACES = 2
    DATA = 3
    SCALE = 4
    NUM_ROWS = 5
    TOP_K = 6
    K = 7
    VALUES = 8
    SCALES = 9
    ROW_BYTES = 10
    IDS = 11  # this and the next three are used if the kernel finds the order of rows
    OFFS = 12
    SLOTS = 13
    EXPERTS = 14
    HEADER = 15  # PeerHeader; used from here on if the kernel waits for other ranks
    HOST_FAULT = 16
    RANK = 17
    NUM_RANKS = 18
    TIMEOUT_NS = 19


class CollectRows(IntEnum):
    """Entries of the table of rows to copy, one row: addresses, extents."""

    H = 0
    ROWS = 1
    GOALS = 2  # read if the kernel has them
    BACK = 3
    SLOTS = 4
    ROW_WORDS = 5  # 16-byte units per row


# Largest number of ranks whose buffers a launch writes: GPUs of one host.
MAX_PEERS = 8


class PeerHeader(IntEnum):
    """int32 words at the beginning of every rank's buffer of symmetric memory."""

    DISPATCHED = 0  # one counter per rank: CTAs that have stored tokens here
    COMBINED = 8  # one counter per rank: CTAs that have stored results here
    FAULT = 16  # 0, or 1 + the number of a rank that did not signal in time
    WORDS = 32  # size of the header


class PushRows(IntEnum):
    """Entries of the table of tokens for peers' buffers, one row: addresses, a stride in bytes, extents, offsets in bytes."""

    X = 0
    GLOBAL_SCALE = 1  # one fp32 factor; unused if the kernel has none
    IDS = 2
    TO_RANK = 3
    TO_LOCAL = 4
    RESULTS = 5
    PEER_0 = 6  # buffers of all ranks, MAX_PEERS
    PEER_1 = 7
    PEER_2 = 8
    PEER_3 = 9
    PEER_4 = 10
    PEER_5 = 11
    PEER_6 = 12
    PEER_7 = 13
    X_PITCH = 14
    ID_BYTES = 15
    TOKENS = 16
    TOP_K = 17
    K = 18
    RANK = 19
    CAPACITY = 20
    EXPERTS = 21
    PERIOD = 22  # columns of TO_RANK
    IDS_AT = 23  # offset in a buffer
    ROWS_AT = 24
    SCALES = 25  # offset in a row
    ROW_BYTES = 26
    CTAS = 27


class PushResults(IntEnum):
    """Entries of the table of results for peers' buffers, one row: addresses, extents, an offset in bytes."""

    H = 0
    ROWS = 1
    PEER_0 = 2  # buffers of all ranks, MAX_PEERS
    PEER_1 = 3
    PEER_2 = 4
    PEER_3 = 5
    PEER_4 = 6
    PEER_5 = 7
    PEER_6 = 8
    PEER_7 = 9
    RANK = 10
    SLOTS = 11  # slots per rank
    ROW_WORDS = 12  # 16-byte units per row
    RESULTS_AT = 13  # offset in a buffer
    CTAS = 14
