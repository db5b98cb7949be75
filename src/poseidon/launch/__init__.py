"""The launcher: ``poseidon run`` starts a script's workers here or over ssh, watches them, and names the first failure.

``run.py`` reads the command line, ``launcher.py`` runs the job, ``agent.py`` runs on every machine.
"""
