"""A prompt becomes a finished, rewarded, version-tagged trajectory group, durable on disk.

The leftmost room: it imports no other room of Concord, and no inference engine outside `rollout/engines`.
"""
