"""Loggers write the metrics of a run to files and tracking tools, one logger per file.

Read ``base.py`` first. ``registry.py`` maps the names in ``loggers=[...]`` to classes, and
``logger_list.py`` is what a trainer calls. To add a logger, write a module with one class and add
one line to the registry.
"""
