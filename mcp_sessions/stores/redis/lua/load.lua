-- needs: session
-- ARGV: now (empty: whatever its deadline), what changed the subscriptions that are known,
-- whether the client's description is known
local found = record(ARGV[2], ARGV[3])
if found and ARGV[1] ~= '' and has_come(found[1][DEADLINES.expires], ARGV[1]) then
    return false
end
return found
