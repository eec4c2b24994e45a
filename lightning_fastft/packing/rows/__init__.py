"""Validate one row at a time. The output is its columns, or an error with one of the reasons in ``rejects``.

``formats`` has the columns of each format and the options. Read ``formats``, then ``parsing``.
"""
