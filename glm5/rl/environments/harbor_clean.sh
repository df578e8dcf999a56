# Of a copy of a box keeps /app and /logs alone, without what would grade itself; fails where something is left.
for each in logs logs/agent logs/artifacts; do [ ! -L $each ] || rm $each; done
mkdir -p app logs && for each in * .[!.]* ..?*; do
    [ "$each" = app ] || chmod -Rf u+rwX "./$each" || :
    [ "$each" = app ] || [ "$each" = logs ] || rm -rf "./$each"
done
rm -rf logs/verifier && mkdir -p logs/verifier
find app -depth '(' -name __pycache__ -o -name '*.pyc' ')' -exec rm -rf {} +
[ -z "$(find . ! -path './app/*' ! -path './logs/*' ! -name . ! -name app ! -name logs; find app -name '*.pyc')" ]
! find app logs -type l -exec readlink -m {} + | grep -qE '^(/box/work)?/(tests|solution|logs/verifier)(/|$)'
