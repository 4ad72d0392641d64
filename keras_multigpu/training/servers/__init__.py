"""Workers and parameter servers, which a coordinator tells what to do.

connection    Servers: what runs where, and which values the parameter servers hold
step          a training step whose passes the workers compute
"""
