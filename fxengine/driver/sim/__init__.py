"""The simulated device: unchanged .cu files run on the CPU, behind the calls of the CUDA driver."""

from fxengine.driver.sim.build import build_shared_object
from fxengine.driver.sim.driver import SimDriver

__all__ = ["SimDriver", "build_shared_object"]
