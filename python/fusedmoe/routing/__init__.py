# SPDX-License-Identifier: Apache-2.0
"""Which experts each token went to: recorded in one run of a model, replayed in another.

    with routing.record(rollout) as seen:
        rollout(**batch)
    with routing.replay(trainer, seen.ids):
        loss = trainer(**batch).loss
    loss.backward()

The experts are those of the record; their weights are computed from the live logits, and have their gradient.
"""

from .context import Record, Replay, checkpoint, record, release, replay
from .formats import from_sglang, from_vllm, place
from .sites import Site, routers

__all__ = ["Record", "Replay", "Site", "checkpoint", "from_sglang", "from_vllm", "place", "record", "release", "replay", "routers"]
