"""What a change of configuration means: which requests are treated differently, how, and what moves with it.

Theory of operation. Two configurations are laid out as leaves, ``pools.chat.policy.settings.load_factor`` -> 2.0, and
what differs is to be explained. Rules look at both configurations as routers would and say sentences; each names the
leaves that it explains. Whatever no rule explains gets a plain sentence from what the schema says of the field, so that
nothing that differs is ever left unsaid, a field of tomorrow included. Values of secrets are in no sentence.
"""

from __future__ import annotations

from controlplane.services.impact.compare import compare_configs, with_settings
from controlplane.services.impact.effect import Effect, Impact

__all__ = ["Effect", "Impact", "compare_configs", "with_settings"]
