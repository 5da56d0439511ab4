"""The specified step (docs/step.md), component by component. What the configuration lacks leaves no trace."""

from __future__ import annotations

import numpy as np

from fxengine.config import ConfigError, StepConfig
from fxengine.nets import aux
from fxengine.nets.builder import StepBuilder
from fxengine.nets.encoder import fixed_features


def specified_step(step: StepBuilder, config: StepConfig) -> None:
    """Declare the step of a configuration.

    Inputs: state [B, S] float32, nb_label [B] int32, regime_label [B] int32.

    Raises:
        ConfigError: the configuration asks for a component that this version does not build.
    """
    if not config.is_aux_only:
        raise ConfigError(
            "this version builds the auxiliary network; use StepConfig.aux_only(...), or set tokens, ofi, branches, "
            "iqn_quantiles, ens, iql_h, cur_h, rec and pred to absent and aux_h above 0"
        )
    batch = config.batch
    aux.declare(step, config)

    state = step.input("state", (batch, config.state))
    next_bar = step.input("nb_label", (batch,), np.int32)
    regime = step.input("regime_label", (batch,), np.int32)

    h1 = step.output("h1", fixed_features(step, state, config.h1))
    heads = aux.forward(step, h1)
    step.output("nb_logits", heads.next_bar)
    step.output("regime_logits", heads.regime)
    step.output("wire", aux.losses(step, heads, next_bar, regime))
