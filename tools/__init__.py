"""The command line of curvfs and its validation tools. Nobody imports this package."""
