"""The commands: a function a command, with its arguments and options as annotations.

typer reads every signature before it can print `--help`, which takes 0.1 s. Torch, numpy or Ray take seconds to import.
So nothing heavy is imported at the top of these files: a function imports its work when it is called. The commands on
sets and `leaks` are worked here; work that has functions and types of its own is a module of jobs/commands.
"""
