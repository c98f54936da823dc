"""Slow loop references, one variant a file: raw states and parameters to the output.

Each is written from its paper's equations as plain Python loops over batch, rows, heads and
channels, in double precision, and calls nothing of the library. Every step is holomorphic
(selections and maxima look at real parts), so `imag(f(p + i eps u)) / eps` is the derivative along
`u` to rounding, without autodiff.
"""
