-- needs: session keys
-- ARGV: owner, mode, now, idle, held, fencing epoch (empty: any), what changed the subscriptions
-- that are known, key, cost of the key (empty: no key), digest, runner, scopes, most bytes of keys,
-- lifetime of keys, run, run whose place it takes (empty: none), whether the client's description is
-- known
--
-- The order of the questions is that of core/admission.py: the owner first (SES10).
local owner, mode, now, idle = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local found = record(ARGV[7], ARGV[17])
if not found then
    return false
end
local fields = found[1]
local ends = seconds(fields[7])
if fields[3] ~= owner or now >= (ARGV[5] == '1' and ends or seconds(fields[6])) then
    return false
end
if fields[2] ~= mode then
    -- Only these two are named on the wire (SES11, SES12); of the others a client knows nothing.
    local modes = mode .. ' ' .. fields[2]
    if modes == 'protocol transport' or modes == 'transport protocol' then
        return { 'other_mode', found }
    end
    return false
end
if ARGV[6] ~= '' and ARGV[6] ~= fields[9] then
    return { 'displaced', found }
end
fields[6] = move_deadline(now, idle, ends)
if redis.call('HDEL', base, 'slept') == 1 then
    return { 'woken', found, redis.call('HGET', base, 'member') }
end
if ARGV[9] == '' then
    return { 'admitted', found }
end
local all = open_keys(ARGV[13], ARGV[14])
local begun, entry, answer = begin_key(
    all, ARGV[8], tonumber(ARGV[9]), ARGV[10], ARGV[11], ARGV[12], now,
    ARGV[15], ARGV[16])
return {
    'admitted', found, begun, entry and entry.runner, entry and entry.scopes, answer,
    entry and entry.run,
}
