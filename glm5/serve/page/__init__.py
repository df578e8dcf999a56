"""The pages for people: `pages.py` sends the files of `static/`, the chat and the dashboard."""
