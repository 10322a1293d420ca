"""The live page at `/chunkcache/`: what is being reused now.

shell.py     the page itself, which holds no data
access.py    who may read its data
history.py   what is kept of requests for it
levels.py    the tree, a page of children at a time
routes.py    the endpoints
"""
