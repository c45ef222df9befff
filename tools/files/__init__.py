"""The file commands of ``curvfs``: what coreutils do for local files, for the files of a Curvine cluster.

======================  ==============================================================================================
``commands``            all of them, for the command line
``targets``             URLs and paths, the connections behind them, failures that do not end a command
``options``             what the commands take in common, and completion of paths
``shown``               records as text and as JSON
``modes``               modes as people write them
``listing``             ls, stat, du, df, report
``changes``             mv, rm, mkdir, touch, chmod, chown, ln
``xattrs``              xattr list, get, set, rm
``transfer``            cat, put, get, cp: what goes where
``copying``             the copying itself: one loop, sources and sinks, progress, Ctrl-C
``local``, ``remote``   the files at both ends, and the partial files that an interrupted copy goes on from
======================  ==============================================================================================
"""
