"""The reader of run directories that every tool uses.

``files`` reads single files, ``run_info`` validates ``run.json``, and ``listing`` finds runs. None
of them trusts a file: its kind, its size, the nesting of its JSON and the type of each field are
checked, so that a damaged run can't crash, block or hide the others.
"""
