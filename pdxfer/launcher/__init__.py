"""Turns a configuration into processes and keeps them: plan (pure), supervise, ready; and the quickstart on top."""
