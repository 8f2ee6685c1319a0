"""Claims of the literature, run: one file for each.

The docstring of a file says what is claimed, where, and by which criterion it is judged, which was written before the
numbers were known. Below it are three functions:

    measure(trial)        the experiment: library code only, seeds from the trial, numbers out; its other argument takes
                          the effect away, and the claim must then fail (tests/claims)
    judge(numbers)        the verdict: holds, holds but weaker, does not hold
    draw(axes, numbers)   the plot

`allmask claims` lists them, `allmask claims C5` runs one, `allmask claims --all --report out` writes a page.
"""
