"""What do the subcommands do? A module each: ``train``, ``check``, ``bench``, ``report``, ``doctor``, ``template``.

What they share: ``composing`` makes a configuration of a command line; ``application``, ``schema`` and ``weight_map``
check it; ``plan`` compares sources with targets; ``problems`` tells what is wrong. Nothing else in the package imports
hydra.
"""
