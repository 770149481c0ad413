"""Structured output: what a client may demand of an answer's form, and the masks of tokens that enforce it.

| module | used by | for |
|---|---|---|
| `constraint.py` | frontends | read the request's fields into one `Constraint` |
| `compiler.py` | frontends | try a constraint in an expendable process, and get the `Grammar` to send to workers |
| `resource.py` | both | write a grammar into a request, and read it |
| `matcher.py` | workers | hold compiled grammars, and fill the masks of a step's rows |

All other modules are parts of these. The grammar library is `llguidance`, which only `matcher.py` and the compile process load.
"""
