-- needs: session
-- ARGV: now (empty: whatever its deadline), what changed the subscriptions that are known,
-- whether the client's description is known
local found = record(ARGV[2], ARGV[3])
if found and ARGV[1] ~= '' and tonumber(ARGV[1]) >= seconds(found[1][6]) then
    return false
end
return found
