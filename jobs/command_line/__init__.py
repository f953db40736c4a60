"""The commands' words: a function a command, with its arguments and options as annotations.

They stand apart from the commands' work in jobs/commands, because typer reads every signature before it can print
`--help`. A module of the work imports torch, numpy or Ray at its top, which takes seconds; `--help` takes 0.1. So a
function here imports its work when it is called, and nothing heavy is imported at the top of these files.
"""
