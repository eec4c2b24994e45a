"""Write, verify, sign, find and resume checkpoints.

Lightning's checkpoint of a run enters; a verified file or folder leaves, local or remote, and enters again on resume.
It is written to a temporary file, hashed, synced and renamed. ``io`` is the plugin that Lightning calls, ``files`` and
``folders`` write the two forms on disk, ``folder_writer`` writes folders in a background thread, ``whole_files`` loads
one file into a sharded model, ``remote`` holds both on other file systems, ``resume`` is the callback for bit-exact
runs, ``settings`` compares their options, ``last`` finds the newest checkpoint, and ``stops`` handles the signals that
save and end a run. Read ``io``, then ``files``.
"""
