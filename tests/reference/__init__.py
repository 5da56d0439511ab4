"""NumPy float64 reference of the whole training step of docs/step.md, written independently of the kernels.

`config` sizes and slots (1, 6, 8, 10) · `forward` (2) · `losses` (3) · `backward` layers (3) · `gradients` of
each loss (3) · `gate` (4) · `optimizer` (5, 6) · `decomposition` (7) · `step` one whole step · `surrogate` the
scalar whose complex-step derivative is the step's gradient · `golden` files (10) · `limits` of the tf32 and bf16
modes (10) · `cases` random configurations. The numbers are the sections of docs/step.md.
"""
