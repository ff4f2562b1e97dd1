"""The whole fleet as one document: exported, edited, planned and applied.

Theory of operation. A bundle says what should be: pools, each with its policy's settings, its replicas and its task
groups. Applying one walks it in an order in which everything that is named exists already (pools, replicas, groups,
policies; then, where asked for, what the bundle no longer names is removed), calls the same services that every other
door calls, and notes what each call changed by looking at the object before and after. All of it is one transaction
and one new configuration. A plan is the same walk, rolled back. So a plan cannot promise what applying then refuses,
and a bundle may do only what its sender may do one by one: each action is held against the rule table.

What a bundle does not mention it leaves alone: a field, or the replicas of a pool that has no ``replicas``.
"""
