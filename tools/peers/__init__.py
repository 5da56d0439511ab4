"""The same training step in other frameworks, to be timed beside this one.

`torch_step`: PyTorch eager, captured as a CUDA graph, and compiled and captured. `jax_step`: JAX, a step or eight of
them per call, with donated state. Each runs the whole step of docs/step.md (the diagnostic decomposition left out) and
has to pass the golden files before it is timed. What may be a constant is one (signals are baked into captured and
compiled steps), which favours the peers.
"""
