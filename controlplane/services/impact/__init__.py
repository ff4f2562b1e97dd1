"""Change impact: which requests a configuration change affects, how, and what share of cached prefixes moves.

Theory of operation. Both configurations are flattened to leaves (``pools.chat.policy.settings.slack_s`` -> 0.06).
Rules compare the configurations as routers would and describe the effects; each effect lists the leaves it explains.
A leaf that no rule explains is described with the schema's own text, so every difference is reported, also of fields
that are added later. Descriptions never contain secrets.
"""
