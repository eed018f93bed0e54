"""Queries that hang on packed rows and see a causal prefix and keys of their own: what chain and block attention share.

Row r holds T queries at positions row + offset + t and J own keys at positions row + 1 + i. A chain is T = 1 and
offset = J; a block is T = J and offset = 1.
"""
