"""Batches of requests that outlive the process: files, their lines, and what became of each."""
