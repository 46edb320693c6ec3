"""For the reference: ``rank, world_size: ...`` in a docstring describes each of these parameters.

Written for a reader, such an entry would be one unknown parameter to the program that makes the
pages; here it becomes an entry for each name, with its own type and default.
"""

import re

import griffe

#: An entry of "Args:" with several names, which may go over two lines.
ENTRY = re.compile(
    r"^(?P<indent> +)(?P<names>\w+(?:,\s+\w+)+): (?P<text>.*(?:\n(?P=indent) +\S.*)*)", re.MULTILINE
)


class ParameterNames(griffe.Extension):
    def on_instance(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = ENTRY.sub(self._one_each, obj.docstring.value)

    @staticmethod
    def _one_each(match):
        names = re.split(r",\s+", match["names"])
        return "\n".join(f"{match['indent']}{name}: {match['text']}" for name in names)
