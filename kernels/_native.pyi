"""Types of the C++ extension (csrc/bindings.cpp). Addresses are integers, checked in kernels/native.py."""

def supported_isas() -> list[str]: ...
def advise_huge_pages(address: int, num_bytes: int) -> None: ...
def num_threads() -> int: ...
def set_num_threads(num_threads: int) -> None: ...
def read_memory(data: int, num_bytes: int) -> int: ...
def multiply_registers(isa: str, int8: bool, num_rounds: int) -> float: ...
def pack_rows(rows: int, first_row: int, num_rows: int, num_k: int, storage: str, packed: int, isa: str) -> None: ...
def packed_bytes(num_columns: int, num_k: int, storage: str, isa: str) -> int: ...

class Linear:
    def __init__(self, packed: int, bias: int, num_columns: int, num_k: int, storage: str, isa: str) -> None: ...
    def run(self, x: int, residual: int, num_rows: int, y: int) -> None: ...

MAX_INT8_LINEAR_K: int

def int8_panels_bytes(num_columns: int, num_k: int, isa: str) -> int: ...
def pack_int8_rows(rows: int, first_row: int, num_rows: int, num_k: int, panels: int, scales: int, isa: str) -> int: ...
def int8_remainder(rows: int, num_rows: int, num_k: int, /) -> None: ...

class Int8Linear:
    levels: int
    def __init__(
        self,
        panels: int,
        scales: int,
        bias: int,
        num_columns: int,
        num_k: int,
        max_absolute_sum: int,
        fine_panels: int,
        fine_scales: int,
        fine_sum: int,
        fine_x: bool,
        isa: str,
        /,
    ) -> None: ...
    def run(self, x: int, num_rows: int, residual: int, y: int) -> None: ...

class NormedLinear:
    def __init__(
        self,
        panels: int,
        scales: int,
        max_absolute_sum: int,
        bias: int,
        norm: int,
        eps: float,
        num_columns: int,
        num_k: int,
        isa: str,
        /,
    ) -> None: ...
    def run(self, x: int, num_rows: int, y: int, /) -> None: ...

class GatedMlp:
    def __init__(
        self,
        gate_up: int,
        gate_up_scales: int,
        gate_up_sum: int,
        down: int,
        down_scales: int,
        down_sum: int,
        norm: int,
        eps: float,
        num_k: int,
        size: int,
        block: int,
        isa: str,
        /,
    ) -> None: ...
    def run(self, x: int, num_rows: int, y: int, /) -> None: ...

class KvShape:
    def __init__(self, storage: str, num_kv_heads: int, num_slots: int, head_dim: int) -> None: ...

class PlannedAttention:
    num_tokens: int
    num_items: int
    def __init__(
        self,
        block_tables: int,
        table_pages: int,
        row_starts: int,
        context_tokens: int,
        num_rows: int,
        num_heads: int,
        shape: KvShape,
        isa: str,
    ) -> None: ...
    def run(self, q: int, k: int, v: int, k_scale: int, v_scale: int, out: int) -> None: ...

def rotary_and_store(
    q: int,
    q_token_stride: int,
    k: int,
    k_token_stride: int,
    v: int,
    v_token_stride: int,
    cos: int,
    sin: int,
    slots: int,
    num_tokens: int,
    num_heads: int,
    shape: KvShape,
    k_pool: int,
    v_pool: int,
    k_scale: int,
    v_scale: int,
    q_out: int,
) -> bool: ...
def rotate_channels(signs: int, mix: int, size: int, block: int, x: int, lines: int, columns: bool, /) -> None: ...

class LayerOps:
    def __init__(self, isa: str) -> None: ...
    def rms_norm(
        self,
        x: int,
        num_outer: int,
        outer_stride: int,
        num_inner: int,
        inner_stride: int,
        size: int,
        weight: int,
        eps: float,
        out: int,
        /,
    ) -> None: ...
    def silu_and_mul(self, gate_up: int, num_rows: int, size: int, block: int, out: int, /) -> None: ...
    def gather_rows(
        self, table: int, storage: str, num_rows: int, size: int, ids: int, num_ids: int, out: int, /
    ) -> None: ...
    def log_prob(
        self, head: Linear | Int8Linear, x: int, num_rows: int, targets: int, num_columns: int, out: int, /
    ) -> None: ...
    def peak(self, values: int, allowed: int, size: int, /) -> tuple[float, int, bool]: ...
