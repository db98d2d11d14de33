"""The embedded engine: a miniature of Qwen3.5 with a DFlash drafter and DDTree verification, on a CPU.

It is a system under test. The rest of benchlib never imports it: the two meet at a command line and at HTTP.
"""
