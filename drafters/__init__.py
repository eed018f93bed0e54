"""Drafters: n-gram lookup, small language models, the EAGLE-3 family.

``BUILTIN`` maps each name to a factory ``(argument, options, target) -> Drafter``; ``resolve`` reads the
command line's ``ngram,eagle3=PATH@window=1024,sink=bos``.
"""

BUILTIN = {
    "ngram": "specbench.drafters.ngram:create",
    "draft-lm": "specbench.drafters.draft_lm:create",
    "eagle3": "specbench.drafters.eagle3_drafter:create",
}
