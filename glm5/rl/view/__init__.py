"""`glm5 rl view`: `server.py` answers the browser, `pages.py` writes the pages, `tokens.py` colours conversations."""
