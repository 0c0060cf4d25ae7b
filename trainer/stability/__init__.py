"""What keeps one bad batch from ruining a policy: gradient norms by block, clips with a memory, optimizers of bounded updates.

It knows no store and no engine.
"""
