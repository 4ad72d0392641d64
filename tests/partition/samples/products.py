"""Samples of products."""

import tensorflow as tf

from samples.operands import B, C, T, add, add_open, floats, weights

for turned in (False, True):
    for other in (False, True):
        shapes = ((T, B) if turned else (B, T)), ((3, T) if other else (T, 3))
        add(
            "MatMul",
            floats(*shapes[0]),
            floats(*shapes[1], special=False),
            transpose_a=turned,
            transpose_b=other,
        )
add("MatMul", floats(2 * B, 3), floats(2 * B, 2, special=False), transpose_a=True)
add("MatMul", floats(B, 3), floats(B, 3, special=False), transpose_b=True)
add_open("MatMul", lambda op, x: op(a=x, b=weights(3, 2)), floats(T, 3, special=False))
for kind in ("BatchMatMul", "BatchMatMulV2"):
    add(kind, floats(B, 2, 3), floats(B, 3, 2, special=False))
add("BatchMatMulV2", floats(B, 1, 2, 3), floats(1, T, 2, 3, special=False), adj_y=True)
add_open("BatchMatMulV2", floats(3, B, 2), floats(B, 3, special=False), adj_x=True)
add("BatchMatMulV2", floats(2, B, 3), floats(3, 2, special=False))
add_open("BatchMatMulV3", floats(B, 2, 3), floats(3, 2, special=False), Tout=tf.float64)
for equation, one, two in (
    ("bi,ij->bj", (B, 3), (3, 2)),
    ("bi,bj->ij", (B, 3), (B, 2)),
    ("bij,bjk->bik", (B, 2, 3), (B, 3, 2)),
    ("bi,bi->", (B, 3), (B, 3)),
    ("...ij,jk->...ik", (B, 2, 3), (3, 2)),
    ("...i,...i->...", (1, B, 3), (T, B, 3)),
    ("bqhd,bkhd->bhqk", (B, T, 2, 2), (B, T, 2, 2)),
    ("bi,cj->bicj", (B, 2), (C, 2)),
):
    add(
        "Einsum",
        lambda op, x, y, e=equation: op(inputs=[x, y], equation=e),
        floats(*one),
        floats(*two, special=False),
    )
add_open("Einsum", lambda op, x: op(inputs=[x], equation="bi->i"), floats(B, 3))
add_open("Einsum", lambda op, x: op(inputs=[x], equation="bb->b"), floats(B, B))
add_open("Einsum", lambda op, x: op(inputs=[x], equation="bi->ib"), floats(B, 3))
