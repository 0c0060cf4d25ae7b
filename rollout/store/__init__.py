"""The embedded trajectory store: one SQLite database for facts, append-only segment files for tokens, one export of
events for people.

It knows dispatches, groups in their encoded form, commit records and policy versions; it never knows what a token
means, how a group was trained, or who calls. `sqlite.store` is the store of a run, `sqlite.reader` looks at one that
is running or finished.
"""
